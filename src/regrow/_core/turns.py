"""Turns: two replays that change the same modules for their time, on two threads, run one after the other.

Only what changes a module waits here: its buffers are replaced, or its mode is switched, and a second replay would take
the first one's values for the module's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Condition

from regrow import errors
from regrow._core.faults import CheckpointError
from regrow._core.lifecycle import Replay

WAIT_S = 60.0  # then the two wait for each other: the function hands work on its own modules to another thread

_freed = Condition()
# By id of the module: the replays that have it, the innermost last.
_taken: dict[int, list[Replay]] = {}


def any_taken() -> bool:
    """Whether a replay is changing modules. Read without a lock."""
    return bool(_taken)


def take(modules: Iterable[int], replay: Replay) -> tuple[int, ...]:
    """Wait until no foreign replay has any of these modules, then have them all.

    A replay that runs inside another, on whichever thread, does not wait for it.
    """
    wanted = tuple(modules)
    inside = list(replay.around())
    with _freed:
        while any(_taken[module][-1] not in inside for module in wanted if module in _taken):
            if not _freed.wait(WAIT_S):
                raise CheckpointError(errors.waited(replay.label, WAIT_S), label=replay.label)
        for module in wanted:
            _taken.setdefault(module, []).append(replay)
    return wanted


def give_back(modules: tuple[int, ...]) -> None:
    """The replay has ended."""
    with _freed:
        for module in modules:
            _taken[module].pop()
            if not _taken[module]:
                del _taken[module]
        _freed.notify_all()
