"""Virtual time: how long a step takes if all that takes time is computation and messages. Exact, and without a clock.

    unit = forward of one stage and micro-batch = its dx = its dw = its replay; a full backward is two
    message arrives = it was sent + latency; sends and receives cost a rank nothing

What replays cost, and when they run, is what `regrow.pipelining` and torch's own checkpoint do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from programs import BACKWARDS, Action, Kind, Programs

Key = tuple[int, int]  # stage and micro-batch
Message = tuple[Kind, int, int]  # what was sent, from which stage, of which micro-batch
N_PARAMETER_GROUPS = 6  # of a block: torch's dw runs one backward for each, and each of them replays the block


@dataclass(frozen=True, slots=True)
class Way:
    """A way to recompute."""

    name: str
    checkpointed: bool = True
    shared: bool = True  # dx and dw share one replay; otherwise every backward replays, as torch's own checkpoint does
    prefire: str = "off"
    whole: bool = True  # a full backward is prefired as a whole; otherwise only its deepest call, as is the default.
    # To the first stage a split backward is a full one, which comes in dw.
    keep: bool = False  # micro-batches whose backward follows their forward are not dropped


@dataclass(frozen=True, slots=True)
class Cost:
    """What takes how long, in units."""

    stage: float = 1.0
    blocks: int = 2  # calls in a stage
    latency: float = 0.0


WAYS = {
    way.name: way
    for way in (
        Way("none", checkpointed=False),
        Way("torch", shared=False),
        Way("lazy"),
        Way("on_wait", prefire="on_wait"),
        Way("on_any_wait", prefire="on_any_wait"),
        Way("default", prefire="on_wait", whole=False, keep=True),
    )
}


def step_units(programs: Programs, way: Way, cost: Cost) -> float:
    """When the last rank is done."""
    arrivals: dict[Message, float] = {}
    ranks = [_Rank(programs, rank, way, cost, arrivals) for rank in range(len(programs.actions))]
    running = deque((rank, rank.run()) for rank in ranks)
    waiting: dict[Message, tuple[_Rank, Iterator[Message]]] = {}
    while running:
        rank, run = running.popleft()
        for wanted in run:  # runs until the rank needs a message that was not sent yet
            waiting[wanted] = rank, run
            break
        running.extend(waiting.pop(sent) for sent in rank.take_sent() if sent in waiting)
    if waiting:
        raise RuntimeError(f"{len(waiting)} ranks wait for messages that nobody sends: {sorted(map(str, waiting))}")
    return max(rank.now for rank in ranks)


@dataclass(slots=True)
class _Rank:
    """One rank, which does one thing at a time."""

    programs: Programs
    rank: int
    way: Way
    cost: Cost
    arrivals: dict[Message, float]
    now: float = 0.0
    left: dict[Key, float] = field(default_factory=dict)  # what is still to be replayed, after forward
    fired: set[Key] = field(default_factory=set)
    sent: list[Message] = field(default_factory=list)
    due: deque[Action] = field(default_factory=deque)  # backwards to come
    follows: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Read the program ahead."""
        order = self.programs.computed(self.rank)
        self.due = deque(action for action in order if action.kind in BACKWARDS)
        self.follows = {
            a.key for a, b in pairwise(order) if a.kind is Kind.FORWARD and b.kind in BACKWARDS and a.key == b.key
        }

    def run(self) -> Iterator[Message]:
        """Go through the program; yields what is needed and was not sent yet."""
        for action in self.programs.actions[self.rank]:
            wanted = self._needs(action)
            if wanted is not None:
                if wanted not in self.arrivals:
                    yield wanted
                self._wait(action, self.arrivals[wanted])
            self._do(action)

    def take_sent(self) -> list[Message]:
        """What was sent since this was last asked."""
        sent, self.sent = self.sent, []
        return sent

    def _needs(self, action: Action) -> Message | None:
        if action.kind is Kind.FORWARD:
            kind, source = Kind.SEND_FORWARD, action.stage - 1
        elif action.kind in BACKWARDS:
            kind, source = Kind.SEND_BACKWARD, action.stage + 1
        else:
            return None
        elsewhere = 0 <= source < self.programs.n_stages and self.programs.rank_of[source] != self.rank
        return (kind, source, action.microbatch) if elsewhere else None

    def _wait(self, action: Action, arrival: float) -> None:
        if action.kind is not Kind.FORWARD:
            if self.way.prefire != "off":
                self._prefire(action)
        elif self.way.prefire == "on_any_wait" and arrival > self.now and self.due:
            self._prefire(self.due[0])
        self.now = max(self.now, arrival)

    def _prefire(self, backward: Action) -> None:
        key = backward.key
        if key not in self.left or key in self.fired:
            return
        self.fired.add(key)
        whole = self.way.whole or (backward.kind is Kind.DX and backward.stage > 0)
        taken = self.left[key] if whole else self.left[key] / self.cost.blocks
        self.left[key] -= taken
        self.now += taken

    def _do(self, action: Action) -> None:
        unit, key = self.cost.stage, action.key
        if action.kind is Kind.FORWARD:
            self.now += unit
            if self.way.checkpointed and not (self.way.keep and key in self.follows):
                self.left[key] = unit
        elif action.kind is Kind.FULL:
            self.due.popleft()
            self.now += 2 * unit + self.left.pop(key, 0.0)
        elif action.kind is Kind.DX:
            self.due.popleft()
            self._dx(key, unit)
        elif action.kind is Kind.DW:
            self._dw(key, unit)
        else:
            message = (action.kind, action.stage, action.microbatch)
            self.arrivals[message] = self.now + self.cost.latency
            self.sent.append(message)

    def _dx(self, key: Key, unit: float) -> None:
        if key[0] == 0:
            return  # the first stage does all of its backward in dw
        self.now += unit + self.left.pop(key, 0.0)

    def _dw(self, key: Key, unit: float) -> None:
        if key[0] == 0:
            self.now += 2 * unit + self.left.pop(key, 0.0)
        elif self.way.shared or not self.way.checkpointed:
            self.now += unit
        else:
            self.now += unit + N_PARAMETER_GROUPS * unit
