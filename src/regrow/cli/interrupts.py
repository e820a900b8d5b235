"""Ctrl-C while ranks start: it waits until they are ready for it. Must never be lost, and never end in a traceback.

A terminal sends it to every process. Fresh ones, which import modules still, would each print where they were; so they
are started with the signal blocked, and let it through when they know what to do. A thread takes it for the launcher.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from regrow.cli.loading import leave

_HAS_MASKS = hasattr(signal, "pthread_sigmask")


@contextmanager
def withheld_from_children() -> Iterator[None]:
    """A context in which processes are started that do not hear of Ctrl-C until they `answer` it; this one does."""
    if not _HAS_MASKS:
        yield
        return
    resource_tracker.ensure_running()  # which lets the signal through again where it is started
    over = threading.Event()
    listener = threading.Thread(target=over.wait, daemon=True)
    listener.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        over.set()
        listener.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def answer() -> None:
    """End this process at Ctrl-C, also at one that came before. The end of a launcher comes as Ctrl-C, too."""
    signal.signal(signal.SIGINT, leave)
    if _HAS_MASKS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
