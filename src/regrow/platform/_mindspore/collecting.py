"""The collector on MindSpore: handles of the calls made inside a context, in forward order. Must never hold a frame."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from regrow._core import replaying
from regrow.platform._mindspore.frames import Frame, Handle

_innermost: ContextVar[list[Handle] | None] = ContextVar("regrow_mindspore_collector", default=None)
Entry = tuple[list[Handle], Handle]


@contextmanager
def collector() -> Iterator[list[Handle]]:
    """A list that fills with a handle per call made inside."""
    handles: list[Handle] = []
    token = _innermost.set(handles)
    try:
        yield handles
    finally:
        _innermost.reset(token)


def add(frame: Frame) -> Entry | None:
    """Give the innermost collector a handle, unless the call is made by a replay."""
    handles = _innermost.get()
    if handles is None or replaying.is_recomputing():
        return None
    handle = Handle(frame)
    handles.append(handle)
    return handles, handle


def mark_empty(entry: Entry | None) -> None:
    """The call needs a gradient, but its backward needs nothing saved: its handle stays, and firing it does nothing."""
    if entry is not None:
        entry[1]._saved_nothing = True


def discard(entry: Entry | None) -> None:
    """Take a handle out again: its forward raised, or nothing of it needs a gradient."""
    if entry is not None and entry[1] in entry[0]:
        entry[0].remove(entry[1])
