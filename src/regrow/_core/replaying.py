"""Whether this thread runs a replay, and for whom. Must never be read on the unpack path of a filled slot."""

from __future__ import annotations

import threading


class _Thread(threading.local):
    label: str | None = None  # the call being replayed
    scheduled = False  # for a session, rather than for one backward
    refusal: BaseException | None = None  # what must end this replay, even if user code swallows it


thread = _Thread()


Before = tuple[str | None, bool, BaseException | None]


def enter(label: str, *, scheduled: bool) -> Before:
    """This thread begins a replay; give the answer to `leave`."""
    before = thread.label, thread.scheduled, thread.refusal
    thread.label, thread.scheduled, thread.refusal = label, scheduled, None
    return before


def leave(before: Before) -> BaseException | None:
    """This thread ends a replay; what was refused inside it, whatever became of that refusal there."""
    refusal = thread.refusal
    thread.label, thread.scheduled, thread.refusal = before
    return refusal


def is_recomputing() -> bool:
    """True while a checkpointed function is run again on this thread, so that it can skip its side effects.

    Returns:
        False in forward and outside checkpointed functions, True inside a replay, however it was started.

    Threads: the answer is that of the calling thread; a replay runs on whichever thread asked for it.
    """
    return thread.label is not None
