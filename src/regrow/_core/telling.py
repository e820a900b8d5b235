"""Telling: events about calls and sessions. Runs only while somebody listens; knows them weakly.

A record follows one replay, from its beginning until it is released or its call dies, whichever comes first:

    begin > replayed > released
                  '--> the graph dies
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from itertools import count
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING
from weakref import ref

from torch.profiler import record_function

from regrow._core import _compat, events
from regrow._core.lifecycle import Reason, Replay
from regrow._core.lines import user_line
from regrow._core.storages import sum_of_sole_bytes

if TYPE_CHECKING:
    import torch

    from regrow._core.frame import Frame, Owner
    from regrow._core.session import Session


class Record:
    """One replay, while it holds something.

    Attributes:
        told_bytes: what it holds, as it was told last.
        passes: how many backwards have read it.
        asked_ns: when the first one came; 0 before.
        refired: whether it was fired although backward had replayed it.
        around: the range for the profiler, if it runs.
    """

    __slots__ = (
        "around",
        "asked_ns",
        "began_ns",
        "call",
        "ended_ns",
        "passes",
        "prefired",
        "refired",
        "replay",
        "session",
        "told",
    )

    def __init__(self, call: int, label: str, session: str | None, *, prefired: bool) -> None:
        self.call = call
        self.around = record_function(f"regrow replay: {label}") if _compat.profiler_runs() else None
        self.replay = next(_replays)
        self.session = session
        self.prefired = prefired
        self.passes = 0 if prefired else 1  # backward that asks reads what it asked for
        self.asked_ns = self.ended_ns = self.told = 0
        self.refired = False
        self.began_ns = perf_counter_ns()

    @property
    def late(self) -> bool:
        """Whether the prefire came too late to be of use in full."""
        return self.refired or (self.prefired and 0 < self.asked_ns < self.ended_ns)


_calls, _replays = count(1), count(1)
# The calls that were told of, weakly, and what is open of each; a call that dies takes itself out.
_alive: dict[int, tuple[ref[Frame], dict[int, Record]]] = {}
# The records of replays that hold something, by number.
_held: dict[int, Record] = {}
_sessions: dict[int, ref[Session]] = {}


def name_of(session_id: Hashable) -> str:
    """How a session is told of."""
    return session_id if isinstance(session_id, str) else repr(session_id)


def forward(frame: Frame, began_ns: int, *, in_replay: bool) -> None:
    """A call has returned."""
    session = None if frame.bound is None else name_of(frame.bound.id)
    call = _number(frame)
    events.emit(events.Forward(call, frame.label, session, in_replay, began_ns, perf_counter_ns(), get_ident()))


def begin(frame: Frame, replay: Replay, *, prefired: bool) -> Record:
    """A replay is about to run."""
    # An owner other than the id of a backward, or an object of its own, is a session.
    owner_id = getattr(replay.owner, "id", None)
    record = Record(_number(frame), frame.label, None if owner_id is None else name_of(owner_id), prefired=prefired)
    replay.record = record
    if record.around is not None:
        record.around.__enter__()
    _alive[record.call][1][record.replay] = record
    return record


def replayed(
    frame: Frame, replay: Replay, record: Record, *, failed: bool, values: list[torch.Tensor] | None = None
) -> None:
    """A replay has ended; if it failed it is released next. The function itself may have cleared its session.

    Args:
        frame: the call.
        replay: the replay.
        record: of `begin`.
        failed: whether it raised.
        values: what it brought back, where the call does not hold that.
    """
    record.ended_ns = perf_counter_ns()
    if record.around is not None:
        record.around.__exit__(None, None, None)
    gone = failed or replay.record is None
    record.told = 0 if gone else sum_of_sole_bytes(frame.values(replay.owner) if values is None else values)
    if record.told:
        _held[record.replay] = record
    events.emit(
        events.Replayed(
            call=record.call,
            label=frame.label,
            replay=record.replay,
            session=record.session,
            prefired=record.prefired,
            failed=failed,
            began_ns=record.began_ns,
            ended_ns=record.ended_ns,
            held_bytes=record.told,
            thread=get_ident(),
            shrunk=tuple(_shrunk(record)),
        )
    )


def asked(frame: Frame, owner: Owner) -> None:
    """A backward reads the replay of an owner: of a session for the first time in a context."""
    replay = frame.replays.get(owner)
    record = None if replay is None else replay.record
    if record is not None:
        record.passes += 1
        record.asked_ns = record.asked_ns or perf_counter_ns()


def fired_again(frame: Frame, owner: Session) -> None:
    """A prefire found a replay in its place."""
    replay = frame.replays.get(owner)
    if replay is not None and replay.record is not None and not replay.record.prefired:
        replay.record.refired = True


def released(frame: Frame, replay: Replay, reason: Reason) -> None:
    """What a replay holds is about to be dropped."""
    record = replay.record
    if record is not None:
        replay.record = None
        left = 0 if reason is Reason.FAILED else weigh(frame, replay.owner)
        _alive.get(record.call, (None, {}))[1].pop(record.replay, None)
        _end(record, frame.label, _REASONS[reason], left)


_REASONS = {
    Reason.CLEARED: "cleared",
    Reason.ENDED: "consumed",
    Reason.LET_GO: "consumed",
    Reason.FAILED: "failed",
}


def weigh(frame: Frame, owner: Owner) -> int:
    """Bytes that only a replay keeps alive: not those of inputs, parameters and whatever else is there anyway."""
    return sum_of_sole_bytes(frame.values(owner))


def session_opened(session: Session) -> None:
    """A session is there that was not."""
    name, key = name_of(session.id), id(session)
    _sessions[key] = ref(session, partial(_session_dropped, key, name))
    events.emit(events.SessionOpened(name, user_line(), perf_counter_ns()))


def session_cleared(session_id: Hashable) -> None:
    """A session was cleared, perhaps one that was gone already."""
    events.emit(events.SessionCleared(name_of(session_id), perf_counter_ns()))


def _session_dropped(key: int, name: str, gone: ref[Session]) -> None:
    if _sessions.get(key) is gone:
        del _sessions[key]
    events.emit(events.SessionDropped(name, perf_counter_ns()))


def _number(frame: Frame) -> int:
    if not frame.number:
        frame.number = next(_calls)
        _alive[frame.number] = ref(frame, partial(_died, frame.number, frame.label)), {}
    return frame.number


def _died(call: int, label: str, _: ref[Frame]) -> None:
    for record in list(_alive.pop(call)[1].values()):
        _end(record, label, "consumed" if record.passes else "dropped", 0)
    events.emit(events.Died(call, label, perf_counter_ns()))


def _end(record: Record, label: str, reason: str, left_bytes: int) -> None:
    _held.pop(record.replay, None)
    events.emit(
        events.Released(
            call=record.call,
            label=label,
            replay=record.replay,
            session=record.session,
            prefired=record.prefired,
            reason=reason,
            at_ns=perf_counter_ns(),
            left_bytes=left_bytes,
            passes=record.passes,
            late=record.late,
        )
    )


def _shrunk(new: Record) -> list[tuple[int, int]]:
    """Where reads let values go, look how much is left; what is empty is not looked at again."""
    found = []
    for record in list(_held.values()):
        frame = None if record is new else _alive.get(record.call, (_nothing, {}))[0]()
        if frame is None or not frame.consume:
            continue
        owner = next((owner for owner, replay in list(frame.replays.items()) if replay.record is record), None)
        left = 0 if owner is None else weigh(frame, owner)
        if left < record.told:
            record.told = left
            found.append((record.replay, left))
        if not left:
            _held.pop(record.replay, None)
    return found


def _nothing() -> None:
    return None
