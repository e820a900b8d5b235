"""What happened, as values, and who listens. Must never hold a tensor or a frame, nor run while nobody listens.

Whoever tells looks first, and that is all an event costs without a listener:

    if events.listeners:
        telling.forward(...)

A call has a few events in its life, and none for the tensors that are saved or read: what was read of a replay is told
when it is released.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from traceback import format_exc
from typing import NamedTuple

_log = logging.getLogger("regrow.trace")


class Forward(NamedTuple):
    """A checkpointed call has returned, and its backward needs what it saved.

    Attributes:
        call: its number, in this process.
        label: the function, with its module path where known.
        session: the session that it belongs to by now.
        in_replay: whether a replay of a call around it made it.
    """

    call: int
    label: str
    session: str | None
    in_replay: bool
    began_ns: int
    ended_ns: int
    thread: int


class Replayed(NamedTuple):
    """A call was run again.

    Attributes:
        call: of the `Forward`.
        replay: its number, in this process.
        session: for which; None for one backward alone.
        prefired: a scheduler asked, not backward.
        failed: the replay raised, and holds nothing.
        held_bytes: what it brought back, the storages that it alone keeps alive.
        shrunk: what else is held by now where it is less than was told: (replay, bytes).
    """

    call: int
    label: str
    replay: int
    session: str | None
    prefired: bool
    failed: bool
    began_ns: int
    ended_ns: int
    held_bytes: int
    thread: int
    shrunk: tuple[tuple[int, int], ...]


class Released(NamedTuple):
    """What a replay held is let go.

    Attributes:
        reason: "consumed" (its backward has ended, or read everything), "cleared", "failed", or "dropped" (its graph
            died before anything was read).
        left_bytes: what was still held.
        passes: how many backwards read it. 0 for a prefire says that it was in vain.
        late: backward asked before the prefire had ended, or it was fired when backward had replayed already.
    """

    call: int
    label: str
    replay: int
    session: str | None
    prefired: bool
    reason: str
    at_ns: int
    left_bytes: int
    passes: int
    late: bool


class Died(NamedTuple):
    """The graph of a call is gone: nothing of it can be replayed any more."""

    call: int
    label: str
    at_ns: int


class SessionOpened(NamedTuple):
    """A session is there, by a context or a prefire. ``where`` is the line of user code."""

    session: str
    where: str
    at_ns: int


class SessionCleared(NamedTuple):
    """``clear_recompute_session`` was called, also where nothing was left."""

    session: str
    at_ns: int


class SessionDropped(NamedTuple):
    """No call is bound to a session any more, and no context of it is open."""

    session: str
    at_ns: int


class Ran(NamedTuple):
    """A pipeline stage has done one thing for one micro-batch.

    Attributes:
        kind: "F", "B" (a full backward), "dx", "dw", "prefire" or "step", which has neither stage nor micro-batch.
        awaits: of a prefire: what the rank waits for meanwhile, as (kind, stage, micro_batch) of what sends it. Whether
            it has come cannot be asked: backends tell that only to whoever waits.
    """

    kind: str
    stage: int
    micro_batch: int
    began_ns: int
    ended_ns: int
    awaits: tuple[str, int, int] | None = None


Event = Forward | Replayed | Released | Died | SessionOpened | SessionCleared | SessionDropped | Ran
Listener = Callable[[Event], None]

# Read where something happens, replaced as a whole where somebody comes or goes.
listeners: tuple[Listener, ...] = ()
_changing = Lock()


def listen(listener: Listener) -> None:
    """Tell a listener everything from now on, on the thread where it happens.

    Args:
        listener: must be quick, must not wait for other threads, and must take what comes from several at once, also
            in the midst of what it does itself: a graph may die anywhere.
    """
    global listeners
    with _changing:
        listeners = (*listeners, listener)


def leave(listener: Listener) -> None:
    """Tell it nothing any more."""
    global listeners
    with _changing:
        listeners = tuple(other for other in listeners if other != listener)  # a bound method is a new object each time


def emit(event: Event) -> None:
    """Tell everyone. What a listener raises is logged: whoever looks on must not end a training."""
    for listener in listeners:
        _tell(listener, event)


def _tell(listener: Listener, event: Event) -> None:
    try:
        listener(event)
    except Exception:
        # As text: a record with the exception would keep what runs here alive as long as a handler keeps the record.
        _log.error("a listener failed at %s:\n%s", type(event).__name__, format_exc())
