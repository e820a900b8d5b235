"""Streams: the queues of a device that work goes into. Through ``torch.get_device_module`` alone.

A replay is queued where forward was, so what follows it there finds it done. One that a scheduler fires on a stream of
its own runs beside what forward's stream still has to do, and is joined by whoever reads it first:

    forward's stream    forward | other work ............ | waits | reads
    the replay's own              waits | replay | event

Source: torch 2.13, notes on CUDA semantics: a tensor that is used on another stream than it was allocated on must be
told to the allocator (``record_stream``), and whoever uses it must wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from regrow._core import compat, devices

# Streams are whatever the module of a device makes: not every vendor's are a torch.Stream.
Streams = tuple[tuple[torch.device, Any], ...]


def current(wanted: Iterable[torch.device]) -> Streams:
    """Where this thread queues work now, on each device that has streams."""
    found = ((device, devices.module_of(device.type)) for device in wanted)
    return tuple(
        (device, module.current_stream(device))
        for device, module in found
        if module is not None and hasattr(module, "current_stream")
    )


def elsewhere(wanted: Streams) -> bool:
    """Whether this thread queues work anywhere else."""
    return wanted != () and current(device for device, _ in wanted) != wanted


@contextmanager
def entered(wanted: Streams) -> Iterator[bool]:
    """Queue work there, and have the streams of now wait for it; tells whether they are others."""
    here = current(device for device, _ in wanted)
    if here == wanted:
        yield False
        return
    with ExitStack() as stack:
        for (device, there), (_, left) in zip(wanted, here, strict=True):
            if left != there:
                module = torch.get_device_module(device.type)
                stack.callback(left.wait_stream, there)
                device_now = module.current_device()  # which to enter a stream may change
                stack.enter_context(module.stream(there))
                stack.enter_context(module.device(device_now))
        yield True


class Aside:
    """A replay whose work is queued on other streams than forward's, and has not been waited for.

    Until it is joined, what it brings back is its own, and nobody else's to read.

    Attributes:
        owner: whose replay it is.
        is_queued: whether all of it is, so that it can be joined.
    """

    __slots__ = ("_events", "_forward", "_own", "is_queued", "owner")

    def __init__(self, owner: Any, forward: Streams) -> None:
        """Wait for what forward's streams hold by now."""
        self.owner = owner
        self._forward = forward
        self._own = current(device for device, _ in forward)
        self._events: list[Any] = []
        self.is_queued = False
        for there, own in self._pairs():
            own.wait_stream(there)

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """The allocator learns what it reads that others may let go of."""
        _tell_allocator(tensors, self._own)

    def queued(self) -> None:
        """All of the replay is queued."""
        self._events = [own.record_event() for _, own in self._own]
        self.is_queued = True

    def join(self, values: Iterable[torch.Tensor]) -> None:
        """Forward's streams, and those of now, wait for the replay, and the allocator learns that they read."""
        here = current(device for device, _ in self._forward)
        readers: list[tuple[torch.device, Any]] = []
        for (device, there), (_, own), (_, reader), event in zip(
            self._forward, self._own, here, self._events, strict=True
        ):
            for stream in [there] if reader == there else [there, reader]:
                if stream != own:
                    stream.wait_event(event)
                    readers.append((device, stream))
        _tell_allocator(values, readers)

    def abandon(self) -> None:
        """Nobody will read it: forward's streams wait, so that what it reads and wrote is not overwritten meanwhile."""
        for there, own in self._pairs():
            there.wait_stream(own)

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """Forward's streams and its own, where they are not the same."""
        pairs = zip(self._forward, self._own, strict=True)
        yield from ((there, own) for (_, there), (_, own) in pairs if there != own)


def _tell_allocator(tensors: Iterable[torch.Tensor], readers: Sequence[tuple[torch.device, Any]]) -> None:
    """Memory of a tensor is not given to others before what its readers have queued by the time it is freed is done."""
    with torch.no_grad(), compat.without_dispatch_modes():
        for tensor in tensors:
            for device, stream in readers:
                if tensor.device == device:
                    for part in _parts(tensor):
                        part.record_stream(stream)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that hold a tensor's memory."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.values() if tensor.is_nested else tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
