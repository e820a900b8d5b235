"""Brought: what SAVE regions of a call saved of their inputs, which each replay brings back for the time that it lives.

A region's own graph outlives the replays, so its slots hold a value for each owner of a replay and none between them.
Values of different owners are the same, so whichever is there is read.
"""

from __future__ import annotations

from weakref import ref

import torch

from regrow._core import compat
from regrow._core.faults import ValueChangedError
from regrow._core.frame import Owner
from regrow._core.watch import Watch


class Place:
    """What a node of a region holds in place of a saved part of an input.

    Attributes:
        values: what replays brought back, with the version it had, by owner.
    """

    __slots__ = ("__weakref__", "values")

    def __init__(self) -> None:
        self.values: dict[Owner, tuple[torch.Tensor, int]] = {}


class Places:
    """The places of one call, in forward order. Weak: the region's graph owns them."""

    __slots__ = ("_all", "_label")

    def __init__(self, label: str) -> None:
        self._label = label
        self._all: list[ref[Place]] = []

    def __len__(self) -> int:
        return len(self._all)

    def hooks(self) -> compat.Hooks:
        """The hooks that save such a part. They hold no call: its regions' graphs hold them."""
        places, label = self._all, self._label

        def pack(_: torch.Tensor) -> Place:
            place = Place()
            places.append(ref(place))
            return place

        def unpack(place: Place) -> torch.Tensor:
            value, version = next(iter(place.values.values()))
            if compat.version_of(value) != version:
                raise ValueChangedError(label, None)
            return value

        return pack, unpack

    def values(self, owner: Owner) -> list[torch.Tensor]:
        """What the replay of an owner brought back."""
        places = [place for place in (reference() for reference in self._all) if place is not None]
        return [place.values[owner][0] for place in places if owner in place.values]

    def drop(self, owner: Owner) -> None:
        """Let go of what the replay of an owner brought back."""
        for reference in self._all:
            place = reference()
            if place is not None:
                place.values.pop(owner, None)

    def filling(self, owner: Owner, watch: Watch | None) -> Filling:
        """For one replay, to fill them."""
        return Filling(self._all, owner, watch)


class Filling:
    """One replay's progress through the places."""

    def __init__(self, places: list[ref[Place]], owner: Owner, watch: Watch | None) -> None:
        self._places = places
        self._owner = owner
        self._watch = watch
        self._next = 0

    def count(self) -> int:
        """How many it has filled."""
        return self._next

    def fill(self, value: torch.Tensor) -> None:
        """The next one."""
        place = self._places[self._next]()
        self._next += 1
        if place is not None:
            if self._watch is not None:
                self._watch.look_at([value])
            place.values[self._owner] = (value, compat.version_of(value))

    def stop_if_back(self) -> None:
        """A replay goes on to its outputs: backward begins there."""
