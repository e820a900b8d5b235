"""Refill: the pack hook of a replay puts what the function saves again into forward's slots. Once per saved tensor."""

from __future__ import annotations

import sys
from weakref import ref

import torch

from regrow._core import compat
from regrow._core.frame import Owner
from regrow._engines.hooks import slots
from regrow._engines.hooks.mismatch import Difference, same_but_for_ragged
from regrow._engines.hooks.slots import Meta, Slot
from regrow._engines.hooks.stopping import WATCHED, Stopper


class Refill:
    """One replay's progress through forward's slots.

    Attributes:
        count: how many tensors the replay has saved.
        wanted: how many to bring back: up to the last slot that is still alive.
        differences: saved tensors that do not look like forward's.
        stopper: ends the replay; None without early stop.
    """

    __slots__ = ("_metas", "_owner", "_places", "_shared", "_watched", "count", "differences", "stopper", "wanted")

    def __init__(
        self, places: list[ref[Slot]], metas: list[Meta] | None, owner: Owner, *, shared: bool, early_stop: bool
    ) -> None:
        self._places = places
        self._metas = metas
        self._owner = owner
        self._shared = shared
        self.count = 0
        self.wanted = slots.live_count(places)
        self.differences: list[Difference] = []
        self.stopper = Stopper() if early_stop else None
        self._watched = self.wanted - WATCHED if early_stop else self.wanted

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook. It answers with the detached tensor: backward inside the function works, and the replay's own
        graph dies with the replay.
        """
        index = self.count
        self.count = index + 1
        value = tensor.detach() if tensor.requires_grad else tensor
        if index < self.wanted:
            slot = self._places[index]()
            if slot is not None:  # backward inside forward frees slots early
                metas = self._metas
                kept = value
                if metas is not None:
                    shape, dtype, device = metas[index]
                    if shape != tensor.shape or dtype is not tensor.dtype or device != tensor.device:
                        kept = self._reconcile(index, tensor, value)
                slot.version = kept._version
                if self._shared:
                    slots.put(slot, self._owner, kept)
                else:
                    slot.owner = self._owner
                    slot.value = kept
            if index >= self._watched and self.stopper is not None:
                self.stopper.saved(tensor, sys._getframe(1), last=index == self.wanted - 1)
        return value

    def close(self) -> None:
        """The replay has ended, one way or the other."""
        if self.stopper is not None:
            self.stopper.close()

    def let_go_of_changed(self) -> tuple[int, ...]:
        """Let go of values that their own function overwrote after saving them; which ones."""
        changed: tuple[int, ...] = ()
        for index, place in enumerate(self._places):
            slot = place()
            if slot is not None:
                value = slots.take(slot, self._owner, consume=False) if self._shared else slot.value
                if value is not None and value._version != slot.version:
                    slots.take(slot, self._owner, consume=True)
                    changed += (index,)
        return changed

    def _reconcile(self, index: int, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The quick comparison failed: give a jagged tensor forward's length, or note a difference."""
        assert self._metas is not None
        forward, replay = self._metas[index], (tensor.shape, tensor.dtype, tensor.device)
        if same_but_for_ragged(forward, replay):
            return compat.with_ragged_size(value, forward[0])
        self.differences.append((index, forward, replay))
        return value
