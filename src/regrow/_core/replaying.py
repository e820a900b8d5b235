"""Whether this thread runs a replay, and for whom. Must never be read on the unpack path of a filled slot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    label: str | None = None  # the call being replayed
    scheduled = False  # for a session, rather than for one backward
    refusal: BaseException | None = None  # what must end this replay, even if user code swallows it


thread = _Thread()


@contextmanager
def entered(label: str, *, scheduled: bool) -> Iterator[None]:
    """While a replay runs. What was refused inside it is raised again when it is left."""
    outer = thread.label, thread.scheduled, thread.refusal
    thread.label, thread.scheduled, thread.refusal = label, scheduled, None
    try:
        yield
        if thread.refusal is not None:
            raise thread.refusal
    finally:
        thread.label, thread.scheduled, thread.refusal = outer


def is_recomputing() -> bool:
    """True while a checkpointed function is run again on this thread, so that it can skip its side effects.

    Returns:
        False in forward and outside checkpointed functions, True inside a replay, however it was started.

    Threads: the answer is that of the calling thread; a replay runs on whichever thread asked for it.
    """
    return thread.label is not None
