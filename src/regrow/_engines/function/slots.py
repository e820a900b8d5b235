"""Slots: what a replay that is kept for later passes saves for backward, so that it can be measured and let go early.

A node of the replay owns its slot, a slot owns its value. Whoever wants to empty slots refers to them weakly.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from weakref import ref

import torch

from regrow._core import compat
from regrow._core.faults import ValueChangedError
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

    Memory: weak; what backward read is noted until the next `let_go`.
    """

    __slots__ = ("_all", "_label", "_readers", "_watching")

    def __init__(self, label: str) -> None:
        self._label = label
        self._all: list[ref[Slot]] = []
        self._watching = False
        self._readers: list[tuple[Any, ref[Slot]]] = []

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
        if self._watching:
            self._readers.append((_compat.running_node(), ref(slot)))
        return value

    def watch(self) -> None:
        """Note from now on which node reads what."""
        self._watching = True

    def let_go(self, needed: Collection[Any]) -> None:
        """Let go of what was read since `watch`, except by the nodes that are needed again."""
        self._watching = False
        readers, self._readers = self._readers, []
        for node, place in readers:
            slot = place()
            if slot is not None and node not in needed:
                slot.value = None

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
