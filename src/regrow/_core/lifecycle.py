"""The life of one replay, as a table of legal moves. Must never hold a tensor.

RUNNING --> HELD --> RELEASED
|                    ^
'--------------------'
the function raised
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, IntEnum, auto
from typing import Any


class State(IntEnum):
    """Where a replay is in its life."""

    RUNNING = auto()
    HELD = auto()
    RELEASED = auto()


class Reason(Enum):
    """Why a replay was released."""

    CLEARED = "cleared"
    ENDED = "its backward ended"
    FAILED = "failed"
    LET_GO = "its call was let go"


MOVES: dict[State, frozenset[State]] = {
    State.RUNNING: frozenset({State.HELD, State.RELEASED}),
    State.HELD: frozenset({State.RELEASED}),
    State.RELEASED: frozenset(),
}


class Replay:
    """One re-execution of a call and what it brought back, for one owner.

    Attributes:
        label: the call that is replayed.
        owner: whose it is.
        scheduled: for a session, rather than for one backward.
        state: only `advance` moves it.
        reason: why it was released; None before.
        refusal: what must end it while it runs, even if user code swallows that.
        transforms: the level of torch.func transforms at which it runs.
        watch: keeps a weak reference to the end of a graph task alive.
        outer: the replay inside which this one runs, or inside which its call was made; None outside any.
        record: what is told of it; None where nobody listened when it began.
        walk: how it goes around the SAVE regions of forward; None while it does not run, or if forward had none.
    """

    # On the class, and set only where they come to differ.
    state = State.RUNNING
    reason: Reason | None = None
    refusal: BaseException | None = None
    transforms = 0
    watch: object = None
    record: Any = None
    walk: Any = None

    def __init__(self, label: str, owner: Any, *, scheduled: bool, outer: Replay | None = None) -> None:
        self.label = label
        self.owner = owner
        self.scheduled = scheduled
        self.outer = outer

    def around(self) -> Iterator[Replay]:
        """The replays around this one, itself first."""
        here: Replay | None = self
        while here is not None:
            yield here
            here = here.outer

    def advance(self, state: State, reason: Reason | None = None) -> None:
        """Make a legal move; an illegal one raises and changes nothing."""
        if state not in MOVES[self.state]:
            raise AssertionError(f"a replay cannot go from {self.state.name} to {state.name}")
        self.state = state
        self.reason = reason
