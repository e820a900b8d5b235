"""Refill: the pack hook of a replay puts what the function saves again into forward's slots. Once per saved tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from operator import length_hint
from threading import get_ident
from types import FrameType

import torch

from regrow._core import compat
from regrow._core.frame import Owner
from regrow._core.watch import Watch
from regrow._engines.hooks import slots
from regrow._engines.hooks.mismatch import Difference, Place, same_but_for_ragged
from regrow._engines.hooks.slots import Saved
from regrow._engines.hooks.stopping import WATCHED, Stop, call_site, must_finish, stop_at_next_call


class Refill:
    """One replay's progress through forward's slots.

    Attributes:
        wanted: how many tensors to bring back: up to the last slot that is still alive.
        differences: saved tensors that do not look like forward's.
        place: where the first of them was saved, or the first one too many.
        watch: to look at what is saved without an operator; None if nothing was changed since forward.
    """

    # On the class, and set only where they come to differ.
    _plain_site: tuple[int, int] | None = None
    _last_count = 0
    _deeper = 0
    _rows: Iterator[Saved] = iter(())
    differences: tuple[Difference, ...] = ()
    place: Place | None = None
    watch: Watch | None = None

    def __init__(self, saved: list[Saved], owner: Owner, *, stop_depth: int | None, shared: bool) -> None:
        """Prepare a replay on this thread.

        Args:
            saved: forward's slots and what its tensors looked like.
            owner: whose values these will be.
            stop_depth: how many function modes this thread has when the function begins; None without early stop.
            shared: whether another owner may hold values in the same slots.
        """
        self._saved = saved
        self._owner = owner
        self._stop_depth = stop_depth
        self._shared = shared
        self._thread = get_ident()
        self.wanted = slots.live_count(saved)
        # The last ones are watched for the stop; without one, none is.
        self._unwatched = self.wanted if stop_depth is None else max(self.wanted - WATCHED, 0)
        if self._unwatched:
            self._rows = iter(saved[: self._unwatched])

    def pack_hook(self, *, watched: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """The hook. It answers with the detached tensor, so the replay's own graph works and dies with the replay.

        Args:
            watched: whether another hook calls it, and stands between it and the operator's caller.
        """
        if watched:
            self._deeper = 1
        if not self._unwatched:
            return self._last
        rows, owner, shared, last = self._rows, self._owner, self._shared, self._last

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            row = next(rows, None)
            if row is None:
                return last(tensor, 2)
            place, shape, dtype, device = row
            value = kept = tensor.detach() if tensor.requires_grad else tensor
            slot = place()
            if slot is None:  # backward inside forward freed it
                return value
            if shape is not None and (
                tensor.shape != shape or tensor.dtype is not dtype or (tensor.is_cpu or tensor.device) != device
            ):
                kept = self._reconcile(row, tensor, value)
            if shared:
                slots.put(slot, owner, kept)
            else:
                slot.version = kept._version
                slot.value = kept
                slot.owner = owner
            return value

        return pack

    def fill(self, value: torch.Tensor) -> None:
        """The next saved tensor, where no operator saves it."""
        row = next(self._rows, None)
        if row is None:
            row = self._saved[self._unwatched + self._last_count]
            self._last_count += 1
        slot = row[0]()
        if slot is not None:
            if self.watch is not None:
                self.watch.look_at([value])
            jagged = row[1] is not None and value.shape != row[1]
            slots.put(slot, self._owner, self._reconcile(row, value, value) if jagged else value)

    def stop_if_back(self) -> None:
        """Stop here, between operators, if every tensor that is wanted is back."""
        if self._stop_depth is not None and self.count() >= self.wanted:
            raise Stop

    def count(self) -> int:
        """How many tensors the replay has saved."""
        return self._unwatched - length_hint(self._rows) + self._last_count

    def _last(self, tensor: torch.Tensor, depth: int = 1) -> torch.Tensor:
        """One of the last tensors, or one more than forward saved; the operator's caller is ``depth`` frames up."""
        index = self._unwatched + self._last_count
        self._last_count += 1
        plain = not tensor.requires_grad
        value = kept = tensor if plain else tensor.detach()
        if index >= self.wanted:
            if index == len(self._saved) and self.place is None:
                self.place = Place.here()
            return value
        row = self._saved[index]
        place, shape, dtype, device = row
        slot = place()
        if slot is not None:
            if shape is not None and (
                tensor.shape != shape or tensor.dtype is not dtype or (tensor.is_cpu or tensor.device) != device
            ):
                kept = self._reconcile(row, tensor, value)
            if self._shared:
                slots.put(slot, self._owner, kept)
            else:
                slot.version = kept._version
                slot.value = kept
                slot.owner = self._owner
        # A gradient inside the function may run on a thread of the engine: no user code to stop there, and no frame.
        if self._stop_depth is not None and (plain or index == self.wanted - 1) and get_ident() == self._thread:
            self._watch(index, sys._getframe(depth + self._deeper), self._stop_depth, plain=plain)
        return value

    def _watch(self, index: int, caller: FrameType, stop_depth: int, *, plain: bool) -> None:
        if plain:
            self._plain_site = call_site(caller)
        if index == self.wanted - 1:
            if not must_finish(caller) and (self._plain_site is None or self._plain_site != call_site(caller)):
                raise Stop
            stop_at_next_call(caller, stop_depth)

    def _reconcile(self, row: Saved, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The quick comparison failed: give a jagged tensor forward's length, or note a difference."""
        place, shape, dtype, device = row
        assert shape is not None
        assert dtype is not None
        assert device is not None
        forward, replay = (shape, dtype, device), slots.look(tensor)
        if same_but_for_ragged(forward, replay):
            return compat.with_ragged_size(value, shape)
        slot = place()
        assert slot is not None
        self.place = self.place or Place.here()
        self.differences += ((slots.index_of(self._saved, slot), forward, replay),)
        return value
