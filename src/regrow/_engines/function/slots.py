"""Slots: what a replay that is kept for later passes saves for backward, so that it can be measured and let go early.

A node of the replay owns its slot, a slot owns its value. Whoever wants to empty slots refers to them weakly.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch

from regrow._core import compat
from regrow._core.faults import ValueChangedError
from regrow._core.watch import Watch
from regrow._engines.function import _compat


class Slot:
    """What a node of a replay holds in place of a saved tensor.

    Attributes:
        value: None once it was let go.
        index: which saved tensor of the replay it is.
    """

    __slots__ = ("__weakref__", "index", "value", "version")

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        # Detached: a node that saves its own result would own itself.
        self.value: torch.Tensor | None = tensor.detach()
        self.version = compat.version_of(tensor)
        self.index = index


class Slots:
    """The slots of one replay.

    Memory: weak. The nodes of the replay hold this, by their hooks, so it must hold no node when a pass is over.
    """

    __slots__ = ("_all", "_label", "_needed", "_spent")

    def __init__(self, label: str) -> None:
        self._label = label
        self._all: list[ref[Slot]] = []
        self._needed: Container[Any] | None = None
        self._spent: list[ref[Slot]] = []

    def pack(self, tensor: torch.Tensor) -> Slot:
        """A node saves a tensor."""
        slot = Slot(tensor, len(self._all))
        self._all.append(ref(slot))
        return slot

    def unpack(self, slot: Slot) -> torch.Tensor:
        """A node reads it back. Autograd checks no versions behind hooks, so it is done here."""
        value = slot.value
        assert value is not None, "a half of backward reads what the other half let go"
        if compat.version_of(value) != slot.version:
            raise ValueChangedError(self._label, slot.index)
        if self._needed is not None and _compat.running_node() not in self._needed:
            self._spent.append(ref(slot))
        return value

    @contextmanager
    def noting(self, needed: Container[Any]) -> Iterator[None]:
        """Note inside what is read by other nodes than those that are needed again."""
        self._needed = needed
        try:
            yield
        finally:
            self._needed = None

    def let_go(self) -> None:
        """Let go of what was noted."""
        spent, self._spent = self._spent, []
        for place in spent:
            slot = place()
            if slot is not None:
                slot.value = None

    def values(self) -> list[torch.Tensor]:
        """What the slots hold."""
        slots = [slot for slot in [place() for place in self._all] if slot is not None]
        return [value for value in [slot.value for slot in slots] if value is not None]

    def held_bytes(self) -> dict[int, int]:
        """Bytes of what the slots hold, by storage."""
        held: dict[int, int] = {}
        for place in self._all:
            slot = place()
            if slot is not None and slot.value is not None:
                storage = compat.storage_key(slot.value)
                size = slot.value.nbytes if storage is None else slot.value.untyped_storage().nbytes()
                held[id(slot) if storage is None else storage] = size
        return held


@contextmanager
def saving(pack: Callable[[torch.Tensor], Any], slots: Slots) -> Iterator[None]:
    """What is saved inside goes into slots."""
    if compat.hooks_are_searched:
        compat.mark_hooks(pack, forward=False)
    compat.push_hooks(pack, slots.unpack)
    try:
        yield
    finally:
        compat.pop_hooks()


@contextmanager
def watching(watch: Watch, slots: Slots) -> Iterator[None]:
    """Operators and what they save are looked at."""
    with saving(watch.pack_hook(slots.pack), slots), watch:
        yield
