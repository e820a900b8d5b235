"""Refill: the pack hook of a replay puts what the function saves again into forward's slots. Once per saved tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain, count, islice, repeat
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import ref

import torch

from regrow._core import compat
from regrow._core.frame import Owner
from regrow._engines.hooks import slots
from regrow._engines.hooks.mismatch import Difference, same_but_for_ragged
from regrow._engines.hooks.slots import Look, Slot
from regrow._engines.hooks.stopping import WATCHED, call_site, stop

_END = (-1, None, None)


class Refill:
    """One replay's progress through forward's slots.

    Attributes:
        wanted: how many tensors to bring back: up to the last slot that is still alive.
        differences: saved tensors that do not look like forward's.
    """

    __slots__ = (
        "_ahead",
        "_depth",
        "_ended",
        "_looks",
        "_owner",
        "_places",
        "_plain_site",
        "_thread",
        "differences",
        "wanted",
    )

    def __init__(self, places: list[ref[Slot]], looks: list[Look] | None, owner: Owner) -> None:
        self._places = places
        self._looks = looks
        self._owner = owner
        self.wanted = slots.live_count(places)
        self.differences: list[Difference] = []
        self._depth: int | None = None
        self._ended = False
        self._thread = get_ident()
        self._plain_site: tuple[int, int] | None = None
        self._ahead: Iterator[int] = count()

    def pack_hook(self, stop_depth: int | None, *, shared: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """The hook. It answers with the detached tensor, so the replay's own graph works and dies with the replay.

        Args:
            stop_depth: how many function modes this thread has now; None without early stop.
            shared: whether another owner may hold values in the same slots.
        """
        self._depth = stop_depth
        # One step of an iterator brings everything forward knows of the next tensor; the last ones are watched.
        looks = repeat(None) if self._looks is None else self._looks
        unwatched = self.wanted if stop_depth is None else max(self.wanted - WATCHED, 0)
        rows = chain(islice(zip(self._ahead, self._places, looks, strict=False), unwatched), repeat(_END))
        owner, last = self._owner, self._last

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            index, place, look = next(rows)
            if place is None:
                return last(tensor)
            value = kept = tensor.detach() if tensor.requires_grad else tensor
            slot = place()
            if slot is None:  # backward inside forward freed it
                return value
            if look is not None and (tensor.shape, tensor.dtype, tensor.is_cpu or tensor.device) != look:
                kept = self._reconcile(index, tensor, value)
            if shared:
                slots.put(slot, owner, kept)
            else:
                slot.version = kept._version
                slot.value = kept
                slot.owner = owner
            return value

        return pack

    def count(self) -> int:
        """How many tensors the replay has saved. To be asked once, after it."""
        return next(self._ahead)

    def _last(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of the last tensors, or one more than forward saved."""
        index = next(self._ahead)
        value = tensor.detach() if tensor.requires_grad else tensor
        if index >= self.wanted:
            return value
        slot = self._places[index]()
        if slot is not None:
            kept = value
            if self._looks is not None and slots.look(tensor) != self._looks[index]:
                kept = self._reconcile(index, tensor, value)
            slots.put(slot, self._owner, kept)
        # A gradient inside the function may run on a thread of the engine: no user code to stop there, and no frame.
        if self._depth is not None and get_ident() == self._thread:
            self._watch(tensor, index, sys._getframe(2), self._depth)
        return value

    def _watch(self, tensor: torch.Tensor, index: int, caller: FrameType, depth: int) -> None:
        if not tensor.requires_grad:
            self._plain_site = call_site(caller)
        if index == self.wanted - 1 and not self._ended:
            self._ended = True
            stop(caller, depth, operator_writes=self._plain_site == call_site(caller))

    def _reconcile(self, index: int, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The quick comparison failed: give a jagged tensor forward's length, or note a difference."""
        looks: Any = self._looks
        forward, replay = looks[index], slots.look(tensor)
        if same_but_for_ragged(forward, replay):
            return compat.with_ragged_size(value, forward[0])
        self.differences.append((index, forward, replay))
        return value
