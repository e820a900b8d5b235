"""Timelines: what every rank did when, from recordings; as JSON for Perfetto, and back. Must never draw.

A lane is one rank. What a stage does follows one another; replays lie inside of it, and what lies between is waiting:

    |  F 0  |.wait.| prefire [ R ] |  dx 0 [ R ]  |  dw 0  |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, get_args

from regrow._core.events import Event, Forward, Ran, Released, Replayed

_BY_NAME: dict[str, Any] = {cls.__name__: cls for cls in get_args(Event)}
STAGE_KINDS = ("F", "B", "dx", "dw", "prefire")


class Slice(NamedTuple):
    """Something that took time.

    Attributes:
        kind: "F", "B", "dx", "dw", "prefire", "R" (a replay), "call" (a checkpointed forward), "wait" or "step".
        name: of a replay or a call: the function, with its module path where known.
        stage: of a pipeline; -1 where it is none.
        awaits: of a prefire: kind, stage and micro-batch of what sends that for which the rank waits.
        prefired: of a replay: a scheduler asked for it.
    """

    kind: str
    began_s: float
    ended_s: float
    name: str = ""
    stage: int = -1
    micro_batch: int = -1
    awaits: tuple[str, int, int] | None = None
    prefired: bool = False

    @property
    def length_s(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s

    def contains(self, other: Slice) -> bool:
        """Whether another one lies in it."""
        return self.began_s <= other.began_s and other.ended_s <= self.ended_s


@dataclass(frozen=True, slots=True)
class Figures:
    """What a lane adds up to.

    Attributes:
        step_s: all steps, or from the first thing to the last where no step was recorded.
        busy_s: what stages did in it.
        replay_s: replays.
        hidden_s: the part of replays in prefires that ran before that for which the rank waited was sent, so that it
            cost no time.
    """

    step_s: float
    busy_s: float
    replay_s: float
    hidden_s: float

    @property
    def idle(self) -> float:
        """The part of the steps in which the rank did nothing: bubbles."""
        return 1 - self.busy_s / self.step_s if self.step_s else 0.0


@dataclass(slots=True)
class Lane:
    """One rank.

    Attributes:
        held: seconds, and the bytes that replays hold from then on.
    """

    rank: int
    slices: list[Slice] = field(default_factory=list)
    held: list[tuple[float, int]] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Slice]:
        """The slices of these kinds."""
        return [each for each in self.slices if each.kind in kinds]

    def windows(self) -> list[Slice]:
        """The steps; one from the first thing to the last where none was recorded."""
        found, stages = self.of("step"), self.of(*STAGE_KINDS)
        if found or not stages:
            return found
        return [Slice("step", min(each.began_s for each in stages), max(each.ended_s for each in stages))]


class Timeline:
    """Lanes on one clock, which starts with the first thing.

    Attributes:
        title: what was recorded.
    """

    def __init__(self, lanes: Sequence[Lane], title: str = "") -> None:
        self.lanes = sorted(lanes, key=lambda lane: lane.rank)
        self.title = title

    @classmethod
    def of(cls, recordings: Sequence[dict[str, Any]], title: str = "") -> Timeline:
        """From what ranks recorded. On one machine their clocks are one; else those of the calendar are trusted.

        Args:
            recordings: of `regrow.trace.recorder.Recorder.recording`, one for each rank.
            title: what was recorded.

        Raises:
            ValueError: two recordings are of the same rank.
        """
        ranks = [recording["rank"] for recording in recordings]
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"recordings are of the ranks {ranks}: give each rank's once, with its rank.")
        one_clock = len({recording["host"] for recording in recordings}) == 1
        lanes = [_lane(each, 0 if one_clock else each["epoch_ns"]) for each in recordings]
        return cls(_from_zero(lanes), title)

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """From what `to_json` wrote.

        Raises:
            ValueError: the text is something else.
        """
        try:
            read = json.loads(text)["regrow"]
            lanes = [
                Lane(lane["rank"], [_slice(each) for each in lane["slices"]], [(s, n) for s, n in lane["held"]])
                for lane in read["lanes"]
            ]
            return cls(lanes, read["title"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"no timeline of regrow.trace.record or regrow train --trace ({error!r}).") from None

    @classmethod
    def joined(cls, timelines: Sequence[Timeline]) -> Timeline:
        """Lanes of several files in one, as they are.

        Raises:
            ValueError: two are of the same rank.
        """
        lanes = [lane for timeline in timelines for lane in timeline.lanes]
        ranks = [lane.rank for lane in lanes]
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"two files are of the same rank: {sorted(ranks)}. Give each rank's file once.")
        return cls(lanes, next((timeline.title for timeline in timelines if timeline.title), ""))

    def figures(self, lane: Lane) -> Figures:
        """What one of the lanes adds up to."""
        windows, replays = lane.windows(), lane.of("R")
        hidden_s = 0.0
        for step, window in enumerate(windows):
            for prefire in _inside([window], lane.of("prefire")):
                sent_s = self._sent(prefire.awaits, step)
                hidden_s += sum(
                    max(0.0, min(each.ended_s, sent_s) - each.began_s) for each in _inside([prefire], replays)
                )
        busy_s = _length(_inside(windows, lane.of(*STAGE_KINDS)))
        return Figures(_length(windows), busy_s, _length(replays), hidden_s)

    def _sent(self, sender: tuple[str, int, int] | None, step: int) -> float:
        """When that was sent for which a rank waits in a step; long ago where it was not recorded."""
        if sender is None:
            return float("-inf")
        kinds = ("dx", "B") if sender[0] == "dx" else (sender[0],)
        sent = [
            each.ended_s
            for lane in self.lanes
            for each in lane.of(*kinds)
            if (each.stage, each.micro_batch) == tuple(sender[1:])
        ]
        return sent[step] if step < len(sent) else float("-inf")

    def to_json(self) -> str:
        """For Perfetto and chrome://tracing, and for `from_json`."""
        lanes = [asdict(lane) for lane in self.lanes]
        events = [event for lane in self.lanes for event in _chrome(lane)]
        everything = {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "regrow": {"version": 1, "title": self.title, "lanes": lanes},
        }
        return json.dumps(everything)


def _slice(fields: list[Any]) -> Slice:
    read = Slice(*fields)
    if read.awaits is None:
        return read
    kind, stage, micro_batch = read.awaits
    return read._replace(awaits=(kind, stage, micro_batch))


def _lane(recording: dict[str, Any], shift_ns: int) -> Lane:
    found = [_BY_NAME[name](*fields) for name, *fields in recording["events"]]
    lane = Lane(recording["rank"])
    lane.slices = sorted(_slices(found, shift_ns), key=lambda each: (each.began_s, -each.ended_s))
    lane.slices += _waits(lane)
    lane.slices.sort(key=lambda each: (each.began_s, -each.ended_s))
    lane.held = _held(found, shift_ns)
    return lane


def _slices(found: Iterable[Event], shift_ns: int) -> Iterator[Slice]:
    for event in found:
        match event:
            case Ran():
                times = (event.began_ns + shift_ns) / 1e9, (event.ended_ns + shift_ns) / 1e9
                yield Slice(event.kind, *times, "", event.stage, event.micro_batch, event.awaits)
            case Replayed() | Forward():
                times = (event.began_ns + shift_ns) / 1e9, (event.ended_ns + shift_ns) / 1e9
                if isinstance(event, Replayed):
                    yield Slice("R", *times, event.label, prefired=event.prefired)
                elif not event.in_replay:
                    yield Slice("call", *times, event.label)


def _waits(lane: Lane) -> Iterator[Slice]:
    """What lies between what stages do, in each step."""
    stages = lane.of(*STAGE_KINDS)
    for window in lane.windows():
        now = window.began_s
        for each in stages:
            if window.contains(each):
                if each.began_s > now:
                    yield Slice("wait", now, each.began_s)
                now = max(now, each.ended_s)
        if window.ended_s > now:
            yield Slice("wait", now, window.ended_s)


def _held(found: Iterable[Event], shift_ns: int) -> list[tuple[float, int]]:
    by_replay: dict[int, int] = {}
    curve: list[tuple[float, int]] = []
    for event in found:
        match event:
            case Replayed():
                by_replay.update(dict(event.shrunk))
                by_replay[event.replay] = event.held_bytes
                at_ns = event.ended_ns
            case Released():
                by_replay.pop(event.replay, None)
                at_ns = event.at_ns
            case _:
                continue
        curve.append(((at_ns + shift_ns) / 1e9, sum(by_replay.values())))
    return sorted(curve, key=lambda point: point[0])


def _from_zero(lanes: Sequence[Lane]) -> list[Lane]:
    zero = min((each.began_s for lane in lanes for each in lane.slices), default=0.0)
    return [
        Lane(
            lane.rank,
            [each._replace(began_s=each.began_s - zero, ended_s=each.ended_s - zero) for each in lane.slices],
            [(at_s - zero, n_bytes) for at_s, n_bytes in lane.held],
        )
        for lane in map(replace, lanes)
    ]


def _inside(around: Sequence[Slice], slices: Sequence[Slice]) -> list[Slice]:
    return [each for each in slices if any(outer.contains(each) for outer in around)]


def _length(slices: Iterable[Slice]) -> float:
    return sum(each.length_s for each in slices)


def _chrome(lane: Lane) -> Iterator[dict[str, Any]]:
    place = {"pid": lane.rank, "tid": 0}
    yield {"ph": "M", "name": "process_name", **place, "args": {"name": f"rank {lane.rank}"}}
    yield {"ph": "M", "name": "thread_name", **place, "args": {"name": "stages and replays"}}
    for each in lane.slices:
        yield {
            "ph": "X",
            "name": _title(each),
            "cat": each.kind,
            "ts": each.began_s * 1e6,
            "dur": each.length_s * 1e6,
            **place,
            "args": {"stage": each.stage, "micro-batch": each.micro_batch} if each.stage >= 0 else {},
        }
    for at_s, n_bytes in lane.held:
        counter = {"ph": "C", "name": "held by replays", "ts": at_s * 1e6, "pid": lane.rank}
        yield {**counter, "args": {"bytes": n_bytes}}


def _title(each: Slice) -> str:
    if each.kind == "R":
        return f"R {each.name}"
    if each.stage >= 0:
        return f"{each.kind} {each.micro_batch} (stage {each.stage})"
    return each.name or each.kind
