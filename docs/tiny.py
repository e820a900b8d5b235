"""The idea of regrow's hooks engine in one file. Read it top to bottom; it runs the same parity programs as regrow.

    forward   saves a tensor  -> pack    leaves an empty Slot with autograd, drops the tensor
    replay    saves it again  -> refill  puts it into forward's Slot
    backward  wants it        -> unpack  reads the Slot, or has the function replayed first

A replay has an owner. Without a session it is the backward call, so each one replays for itself, as in torch. In a
session it is the session: prefire, dx and dw find the same values in the slots. What is left out here: random numbers,
autocast, locks, checks, early stop by operator, several owners at once, errors that help. That is the rest of regrow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class Slot:
    """Stands in the graph for one saved tensor, and owns it once it is regrown: a dead node frees its tensor."""

    __slots__ = ("__weakref__", "owner", "value")

    def __init__(self) -> None:
        self.owner: object = None
        self.value: torch.Tensor | None = None


class Stop(BaseException):
    """Every slot is full: the rest of the function has nothing to add."""


class Frame:
    """One checkpointed call. It knows its slots weakly: they belong to the graph."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.slots: list[weakref.ref[Slot]] = []
        self.session: Session | None = None

    def pack(self, tensor: torch.Tensor) -> Slot:
        """Forward saves a tensor: leave a slot."""
        slot = Slot()
        self.slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: Slot) -> torch.Tensor:
        """Backward wants a tensor: read its slot, or replay for whoever is asking."""
        session = self.session
        owner = session if session is not None and session.open else torch._C._current_graph_task_id()
        if slot.owner != owner or slot.value is None:
            self.replay(owner)
        value = slot.value
        assert value is not None
        if session is None or not session.retain:
            slot.value = None
        return value

    def replay(self, owner: object) -> None:
        """Run the function again; what it saves goes into the slots, in the same order."""
        ahead = iter(list(self.slots))
        left = sum(place() is not None for place in self.slots)

        def refill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal left
            value = tensor.detach()
            slot = next(ahead, lambda: None)()
            if slot is not None:
                slot.owner, slot.value = owner, value
                left -= 1
                if left == 0:
                    raise Stop
            return value

        with saved_tensors_hooks(refill, lambda value: value), torch.enable_grad(), suppress(Stop):
            self.function(*self.args, **self.kwargs)


class Session:
    """An owner that several backward calls share."""

    def __init__(self) -> None:
        self.frames: weakref.WeakSet[Frame] = weakref.WeakSet()
        self.open = self.retain = False


sessions: dict[Hashable, Session] = {}


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without keeping what it saves for backward."""
    frame = Frame(function, args, kwargs)
    for session in sessions.values():
        if session.open:
            bind(frame, session)
    with saved_tensors_hooks(frame.pack, frame.unpack):
        return function(*args, **kwargs)


def bind(frame: Frame, session: Session) -> None:
    """The frame belongs to the session until it is cleared."""
    frame.session = session
    session.frames.add(frame)


def prefire(frame: Frame, session_id: Hashable) -> None:
    """Replay now, before backward asks."""
    session = sessions.setdefault(session_id, Session())
    bind(frame, session)
    frame.replay(session)


@contextmanager
def session_ctx(session_id: Hashable, *, retain: bool) -> Iterator[None]:
    """Backward inside reads what the session holds, and keeps it there if told to retain."""
    session = sessions.setdefault(session_id, Session())
    session.open, session.retain = True, retain
    try:
        yield
    finally:
        session.open = False


def clear(session_id: Hashable) -> None:
    """Drop everything the session holds."""
    session = sessions.pop(session_id, Session())
    for frame in session.frames:
        frame.session = None
        for slot in filter(None, (place() for place in frame.slots)):
            if slot.owner is session:
                slot.value = None


if __name__ == "__main__":
    runs = 0

    def block(x: torch.Tensor) -> torch.Tensor:
        """Count the runs."""
        global runs
        runs += 1
        return (x @ weight).sin() @ weight

    weight, x = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    with session_ctx("demo", retain=True):
        loss = checkpoint(block, x).sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        torch.autograd.grad(loss, weight, retain_graph=True)
    clear("demo")
    print(f"forward, dx and dw: the block ran {runs} times")  # noqa: T201
