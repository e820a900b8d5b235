"""Refill: the pack hook of a replay puts what the function saves again into forward's slots. Once per saved tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from regrow._core import compat
from regrow._core.frame import Owner
from regrow._engines.hooks import slots
from regrow._engines.hooks.mismatch import Difference, same_but_for_ragged
from regrow._engines.hooks.slots import Meta, Slot
from regrow._engines.hooks.stopping import WATCHED, Stopper


class Refill:
    """One replay's progress.

    Attributes:
        pack: the hook to install; it answers with the detached tensor, so that backward inside the function works and
            the replay's own graph dies with the replay.
        wanted: how many tensors to bring back, up to the last slot that is still alive.
        differences: saved tensors that do not look like forward's.
        stopper: set with early stop.
    """

    def __init__(self, places: list[ref[Slot]], metas: list[Meta] | None, owner: Owner, *, shared: bool) -> None:
        self.wanted = slots.live_count(places)
        self.differences: list[Difference] = []
        self.stopper: Stopper | None = None
        self.pack, self._count = _hook(self, places, metas, owner, shared=shared)

    @property
    def count(self) -> int:
        """How many tensors the replay has saved."""
        return self._count()

    def reconcile(self, index: int, forward: Meta, replay: Meta, value: torch.Tensor) -> torch.Tensor:
        """The quick comparison failed: give a jagged tensor forward's length, or note a difference."""
        if same_but_for_ragged(forward, replay):
            return compat.with_ragged_size(value, forward[0])
        self.differences.append((index, forward, replay))
        return value


def _hook(
    refill: Refill,
    places: list[ref[Slot]],
    metas: list[Meta] | None,
    owner: Owner,
    *,
    shared: bool,
) -> tuple[Callable[[torch.Tensor], Any], Callable[[], int]]:
    wanted = refill.wanted
    watched = wanted - WATCHED
    index = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal index
        mine = index
        index = mine + 1
        if mine >= watched:
            return last(tensor, mine)
        slot = places[mine]()
        if slot is None:  # backward inside forward has freed this one
            return tensor.detach()
        value = kept = tensor.detach() if tensor.requires_grad else tensor
        if metas is not None:
            meta = (tensor.shape, tensor.dtype, tensor.device)
            if meta != metas[mine]:
                kept = refill.reconcile(mine, metas[mine], meta, value)
        if shared:
            slots.put(slot, owner, kept)
        else:
            slot.owner = owner
            slot.value = kept
        slot.version = kept._version
        return value

    def last(tensor: torch.Tensor, mine: int) -> torch.Tensor:
        value = tensor.detach() if tensor.requires_grad else tensor
        if mine >= wanted:
            return value
        slot = places[mine]()
        if slot is not None:
            kept = value
            meta = (tensor.shape, tensor.dtype, tensor.device)
            if metas is not None and meta != metas[mine]:
                kept = refill.reconcile(mine, metas[mine], meta, value)
            slots.put(slot, owner, kept)
            slot.version = kept._version
        stopper = refill.stopper
        if stopper is not None:
            stopper.watch(tensor)
            if mine == wanted - 1:
                stopper.finish()
        return value

    return pack, lambda: index
