"""Moves: what a SAVE region moves on although replays do not run it: generators, buffers, and modes of modules.

A replay begins with what forward found (`environment`, `state`); behind a region that it goes around it must go on with
what forward had there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from regrow._core import compat, devices
from regrow._core.buffers import Copied, Mark, put_copies
from regrow._core.environment import Environment
from regrow._core.state import State

# A device, for its default generator, or a generator of the user's.
_Source = torch.device | torch.Generator
_States = list[tuple[_Source, torch.Tensor]]


class Moves:
    """What one region moves of what replays of one call restore.

    Memory: holds generator states, about 5 KB each, and copies of buffers, both only of those that were moved.
    """

    __slots__ = ("_buffers", "_generators", "_marks", "_modes", "_state")

    def __init__(self, environment: Environment, state: State | None) -> None:
        """Note where everything stands when the region begins."""
        self._state = state
        sources: list[_Source] = [*environment.rng_devices()]
        if state is not None:
            sources += state.generators()
        self._generators = _states_of(sources)
        self._marks: list[Mark] = [] if state is None else state.buffers.marks()
        self._buffers: Copied = []
        self._modes = [] if state is None else state.modes()

    def end(self) -> None:
        """The region has ended: keep what it moved."""
        now = _states_of(source for source, _ in self._generators)
        with compat.without_dispatch_modes():
            self._generators = [
                here for here, (_, then) in zip(now, self._generators, strict=True) if not torch.equal(here[1], then)
            ]
        if self._state is not None:
            self._buffers = self._state.buffers.moved_since(self._marks)
            modes = self._state.modes()
            self._modes = [] if modes == self._modes else modes
        self._marks = []

    def again(self) -> None:
        """In a replay, behind the region: let everything stand as in forward."""
        for source, state in self._generators:
            if isinstance(source, torch.Generator):
                source.set_state(state)
            else:
                devices.set_rng_state(source, state)
        if self._buffers:
            put_copies(self._buffers)
        if self._state is not None and self._modes:
            self._state.set_modes(self._modes)


def _states_of(sources: Iterable[_Source]) -> _States:
    found = ((source, _state_of(source)) for source in sources)
    return [(source, state) for source, state in found if state is not None]


def _state_of(source: _Source) -> torch.Tensor | None:
    return source.get_state() if isinstance(source, torch.Generator) else devices.rng_state(source)
