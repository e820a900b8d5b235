"""Random numbers on MindSpore: a replay draws what forward drew, and the caller's state does not move.

There are two sources. Operators of ``mint`` draw from the default generator; on CPU there are none of them. Those of
``ops`` take a seed from a count per operator and a seed of the process, or, where ``set_seed`` was never called, from
the clock, which nothing could repeat: for the time of forward the process is given a seed then. The cells and operators
that keep their state in their kernel cannot be rewound at all; the cells are found, and refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from regrow.platform._mindspore import _compat

_system = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class RandomState:
    """Where random numbers come from next.

    Attributes:
        generator: the state of the default generator.
        op_seeds: how far each operator has counted.
        seed: the seed of the process.
    """

    generator: Any
    op_seeds: dict[Any, int]
    seed: int | None


def captured() -> RandomState:
    """The state now."""
    return RandomState(_compat.mindspore.get_rng_state(), dict(_compat.op_seeds), _compat.global_seed())


def restore(state: RandomState) -> None:
    """Go on from a state."""
    _compat.mindspore.set_rng_state(state.generator)
    _compat.op_seeds.clear()
    _compat.op_seeds.update(state.op_seeds)
    _compat.set_global_seed(state.seed)


@contextmanager
def repeatable() -> Iterator[RandomState]:
    """Around forward: what it draws can be drawn again from the state that this yields."""
    unseeded = _compat.global_seed() is None
    ours = _system.randrange(1, 2**31 - 1)
    if unseeded:
        _compat.set_global_seed(ours)
    try:
        yield captured()
    finally:
        if unseeded and _compat.global_seed() == ours:  # unless the function called set_seed
            _compat.set_global_seed(None)


@contextmanager
def repeated(state: RandomState) -> Iterator[None]:
    """Around a replay: it draws from forward's state, and the caller's is as before, also when it fails."""
    caller = captured()
    restore(state)
    try:
        yield
    finally:
        restore(caller)


def unrepeatable(cells: Iterable[tuple[str, Any]]) -> list[str]:
    """The cells whose random numbers cannot be drawn again, by name."""
    nn = _compat.mindspore.nn
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    found = [
        f"{name} ({type(cell).__name__})" if name else type(cell).__name__
        for name, cell in cells
        if isinstance(cell, kinds) and cell.training and draws(cell)
    ]
    # Measured on CPU. Of other devices nothing is known, and nothing is refused.
    return found if found and _compat.mindspore.get_context("device_target") == "CPU" else []


def draws(cell: Any) -> bool:
    """Whether a dropout cell drops anything. Some know the part they drop, some the part they keep."""
    for dropped in ("p", "prob"):
        part = getattr(cell, dropped, None)
        if part is not None:
            return bool(part > 0)
    return bool(cell.keep_prob < 1)
