"""Whether this thread runs a replay, and for whom. Must never be read on the unpack path of a filled slot."""

from __future__ import annotations

import threading


class Running:
    """A replay that runs on a thread.

    Attributes:
        label: the call that is replayed.
        scheduled: for a session, rather than for one backward.
        refusal: what must end this replay, even if user code swallows it.
    """

    __slots__ = ("label", "refusal", "scheduled")

    def __init__(self, label: str, *, scheduled: bool) -> None:
        self.label = label
        self.scheduled = scheduled
        self.refusal: BaseException | None = None


class _Thread(threading.local):
    running: Running | None = None


thread = _Thread()


def is_recomputing() -> bool:
    """True while a checkpointed function is run again on this thread, so that it can skip its side effects.

    Returns:
        False in forward and outside checkpointed functions, True inside a replay, however it was started.

    Threads: the answer is that of the calling thread; a replay runs on whichever thread asked for it.
    """
    return thread.running is not None
