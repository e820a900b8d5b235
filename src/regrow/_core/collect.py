"""The collector: handles of the calls made inside a context, in forward order. Must never hold a frame."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from regrow._core import replaying
from regrow._core.frame import Frame, Handle

innermost: ContextVar[list[Handle] | None] = ContextVar("regrow_collector", default=None)


@contextmanager
def collector() -> Iterator[list[Handle]]:
    """A list that fills with a handle per call made inside."""
    handles: list[Handle] = []
    token = innermost.set(handles)
    try:
        yield handles
    finally:
        innermost.reset(token)


def add(frame: Frame, kind: type[Handle] = Handle) -> tuple[list[Handle], Handle] | None:
    """Give the innermost collector a handle, unless the call is made by a replay; return what `discard` needs."""
    handles = innermost.get()
    if handles is None or replaying.thread.here.replay is not None:
        return None
    handle = kind(frame)
    handles.append(handle)
    return handles, handle


def mark_empty(entry: tuple[list[Handle], Handle] | None) -> None:
    """The call needs a gradient, but its backward needs nothing saved: its handle stays, and firing it does nothing."""
    if entry is not None:
        entry[1]._saved_nothing = True


def discard(entry: tuple[list[Handle], Handle] | None) -> None:
    """Take a handle out again: its forward raised, or nothing of it needs a gradient."""
    if entry is not None and entry[1] in entry[0]:
        entry[0].remove(entry[1])
