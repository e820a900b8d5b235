"""Whether this thread runs a replay, and which. Must never be read on the unpack path of a filled slot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from regrow._core.lifecycle import Replay


class Here:
    """What runs on one thread.

    Attributes:
        replay: the innermost replay whose function runs.
        reading: the replay that is bringing its inputs back, perhaps out of a call around it.
        forward: the innermost checkpointed call whose forward runs.
        plain: calls are plain ones here, and leave no frame.
        region: the SAVE region that runs, or is gone around, here.
        reentrant: a call of the reentrant engine runs its function, in forward or in a replay.
    """

    replay: Replay | None = None
    reading: Replay | None = None
    forward: Any = None
    plain: bool = False
    region: Any = None
    reentrant: bool = False


class _Thread(threading.local):
    """One `Here` for each thread: looked up once per call, and then read like any object."""

    def __init__(self) -> None:
        self.here = Here()


thread = _Thread()


@contextmanager
def plain_calls() -> Iterator[None]:
    """Checkpointed calls on this thread are plain ones: their activations are kept, and nothing is replayed."""
    here = thread.here
    before, here.plain = here.plain, True
    try:
        yield
    finally:
        here.plain = before


def place() -> tuple[int, Replay | None, Any]:
    """Where code runs: one value per execution of a function, others for what is not part of both runs of it.

    That is: replays and SAVE regions inside it, and threads of the engine.
    """
    here = thread.here
    return threading.get_ident(), here.replay, here.region


def is_recomputing() -> bool:
    """True while a checkpointed function is run again on this thread, so that it can skip its side effects.

    Returns:
        False in forward and outside checkpointed functions, True inside a replay, however it was started.

    Threads: the answer is that of the calling thread; a replay runs on whichever thread asked for it.
    """
    return thread.here.replay is not None
