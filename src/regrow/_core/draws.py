"""Draws: where random generators stand after a SAVE region that used them. Must never draw."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from regrow._core import compat, devices

# A device, for its default generator, or a generator of the user's.
Source = torch.device | torch.Generator
States = list[tuple[Source, torch.Tensor]]


def states_of(sources: Iterable[Source]) -> States:
    """Where generators stand."""
    found = ((source, _state(source)) for source in sources)
    return [(source, state) for source, state in found if state is not None]


def moved_since(before: States) -> States:
    """Where those generators stand now that have moved."""
    now = states_of(source for source, _ in before)
    with compat.without_dispatch_modes():
        return [here for here, (_, then) in zip(now, before, strict=True) if not torch.equal(here[1], then)]


def set_states(states: States) -> None:
    """Let generators stand where they stood."""
    for source, state in states:
        if isinstance(source, torch.Generator):
            source.set_state(state)
        else:
            devices.set_rng_state(source, state)


def _state(source: Source) -> torch.Tensor | None:
    return source.get_state() if isinstance(source, torch.Generator) else devices.rng_state(source)
