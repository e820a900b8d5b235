"""The rungs: ways to run one function of one tensor. Must never do more than a user of each would write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from figures import PLAIN, REFERENCE, SECOND
from harness import Variant
from regrow.call import checkpoint

Function = Callable[[Tensor], Tensor]
REGROW = "regrow"
REENTRANT = "regrow reentrant"


class Slot:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("value",)
    value: Tensor


def floor(function: Function, x: Tensor) -> Tensor:
    """A checkpoint that only does what none on saved-tensor hooks written in Python can do without.

    A slot for each saved tensor, one replay at the first unpack, its tensors detached into the slots. It leaves out all
    that makes a checkpoint right: inputs detached and checked for changes, random numbers and autocast, comparing the
    two runs, early stop, owners and sessions, locks, release when backward ends, slots that die with their graph node,
    nesting, and a second read after release.
    """
    waiting: list[Slot] = []

    def pack(_: Tensor) -> Slot:
        slot = Slot()
        waiting.append(slot)
        return slot

    def unpack(slot: Slot) -> Tensor:
        if waiting:
            replay()
        return slot.value

    def replay() -> None:
        slots = iter(waiting)

        def refill(tensor: Tensor) -> Tensor:
            next(slots).value = value = tensor.detach()  # attached, it would keep the graph of the replay
            return value

        with saved_tensors_hooks(refill, _as_packed), torch.enable_grad():
            function(x)
        waiting.clear()

    with saved_tensors_hooks(pack, unpack):
        return function(x)


def of(function: Function, x: Tensor) -> list[Variant]:
    """All variants of a call, the plain one first."""
    return [
        Variant(PLAIN, partial(function, x)),
        Variant("floor", partial(floor, function, x)),
        Variant(REGROW, partial(checkpoint, function, x)),
        Variant(REFERENCE, partial(torch_checkpoint, function, x, use_reentrant=False)),
        Variant(REENTRANT, partial(checkpoint, function, x, use_reentrant=True)),
        Variant(SECOND, partial(torch_checkpoint, function, x, use_reentrant=True)),
    ]


def count_saved(function: Function, x: Tensor) -> int:
    """How many tensors autograd saves in a call."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(saved.append, _as_packed):
        function(x)
    return len(saved)


def _as_packed(value: Tensor) -> Tensor:
    return value
