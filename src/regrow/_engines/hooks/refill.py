"""Refill: the pack hook of a replay puts what the function saves again into forward's slots. Once per saved tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain, count, islice, repeat
from threading import get_ident
from types import FrameType
from weakref import ref

import torch

from regrow._core import compat
from regrow._core.frame import Owner
from regrow._engines.hooks import slots
from regrow._engines.hooks.mismatch import Difference, same_but_for_ragged
from regrow._engines.hooks.slots import Look, Slot
from regrow._engines.hooks.stopping import WATCHED, Stop, call_site, must_finish, stop_at_next_call

_END = (-1, None, None)


class Refill:
    """One replay's progress through forward's slots.

    Attributes:
        wanted: how many tensors to bring back: up to the last slot that is still alive.
        differences: saved tensors that do not look like forward's.
    """

    __slots__ = (
        "_ahead",
        "_looks",
        "_owner",
        "_places",
        "_plain_site",
        "_shared",
        "_stop_depth",
        "_thread",
        "differences",
        "wanted",
    )

    def __init__(
        self,
        places: list[ref[Slot]],
        looks: list[Look] | None,
        owner: Owner,
        *,
        stop_depth: int | None,
        shared: bool,
    ) -> None:
        """Prepare a replay on this thread.

        Args:
            places: forward's slots.
            looks: what forward's tensors looked like; None if that is not compared.
            owner: whose values these will be.
            stop_depth: how many function modes this thread has when the function begins; None without early stop.
            shared: whether another owner may hold values in the same slots.
        """
        self._places = places
        self._looks = looks
        self._owner = owner
        self._stop_depth = stop_depth
        self._shared = shared
        self._thread = get_ident()
        self._plain_site: tuple[int, int] | None = None
        self._ahead: Iterator[int] = count()
        self.wanted = slots.live_count(places)
        self.differences: list[Difference] = []

    def pack_hook(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The hook. It answers with the detached tensor, so the replay's own graph works and dies with the replay."""
        unwatched = self.wanted if self._stop_depth is None else self.wanted - WATCHED
        if unwatched <= 0:
            return self._last
        # One step of an iterator brings everything forward knows of the next tensor.
        looks = repeat(None) if self._looks is None else self._looks
        rows = chain(islice(zip(self._ahead, self._places, looks, strict=False), unwatched), repeat(_END))
        owner, shared, last = self._owner, self._shared, self._last

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            index, place, look = next(rows)
            if place is None:
                return last(tensor, 2)
            value = kept = tensor.detach() if tensor.requires_grad else tensor
            slot = place()
            if slot is None:  # backward inside forward freed it
                return value
            if look is not None and (tensor.shape, tensor.dtype, tensor.is_cpu or tensor.device) != look:
                kept = self._reconcile(index, look, tensor, value)
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

    def _last(self, tensor: torch.Tensor, depth: int = 1) -> torch.Tensor:
        """One of the last tensors, or one more than forward saved; the operator's caller is ``depth`` frames up."""
        index = next(self._ahead)
        plain = not tensor.requires_grad
        value = kept = tensor if plain else tensor.detach()
        if index >= self.wanted:
            return value
        slot = self._places[index]()
        if slot is not None:
            looks = self._looks
            if looks is not None and (tensor.shape, tensor.dtype, tensor.is_cpu or tensor.device) != looks[index]:
                kept = self._reconcile(index, looks[index], tensor, value)
            if self._shared:
                slots.put(slot, self._owner, kept)
            else:
                slot.version = kept._version
                slot.value = kept
                slot.owner = self._owner
        # A gradient inside the function may run on a thread of the engine: no user code to stop there, and no frame.
        if self._stop_depth is not None and (plain or index == self.wanted - 1) and get_ident() == self._thread:
            self._watch(index, sys._getframe(depth), self._stop_depth, plain=plain)
        return value

    def _watch(self, index: int, caller: FrameType, stop_depth: int, *, plain: bool) -> None:
        if plain:
            self._plain_site = call_site(caller)
        if index == self.wanted - 1:
            if not must_finish(caller) and (self._plain_site is None or self._plain_site != call_site(caller)):
                raise Stop
            stop_at_next_call(caller, stop_depth)

    def _reconcile(self, index: int, forward: Look, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The quick comparison failed: give a jagged tensor forward's length, or note a difference."""
        replay = slots.look(tensor)
        if same_but_for_ragged(forward, replay):
            return compat.with_ragged_size(value, forward[0])
        self.differences.append((index, forward, replay))
        return value
