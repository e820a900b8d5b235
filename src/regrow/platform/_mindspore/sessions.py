"""Sessions on MindSpore: which session a call belongs to, and the contexts around MindSpore's own. Holds no value.

MindSpore keeps the values, under a key, for any call that backward reaches while a context is open. What it has no
notion of stands here: that a call belongs to one session at a time, that contexts nest only with the same id, and that
what was let go can be replayed again.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from regrow import errors
from regrow.platform._mindspore import _compat, records
from regrow.platform._mindspore.faults import CheckpointError, FrameBusyError
from regrow.platform._mindspore.frames import Frame

# What MindSpore says of a value that was read and let go. It has no class of its own.
_READ_TWICE = "make sure to do this only once"


class Session:
    """One owner of replays.

    Attributes:
        id: the caller's name for it.
        key: MindSpore's. Not the id alone: MindSpore keeps a plain backward under a number.
        frames: the calls bound to it, weakly.
        contexts: the open contexts, the innermost last.
        lets_go: whether a context that lets go was open since the session began.
    """

    def __init__(self, session_id: Hashable) -> None:
        self.id = session_id
        self.key = ("regrow", session_id)
        self.frames: WeakSet[Frame] = WeakSet()
        self.contexts: list[Context] = []
        self.lets_go = False

    def renew(self) -> None:
        """Drop what is left of replays that were let go in part: MindSpore would refuse to read them again."""
        for frame in list(self.frames):
            record = frame.record()
            if record is not None and records.has_let_go(record, self.key):
                records.forget(record, self.key)


class Context:
    """One open context of a session."""

    __slots__ = ("retain", "session")

    def __init__(self, session: Session, *, retain: bool) -> None:
        self.session = session
        self.retain = retain


_control = threading.RLock()
_sessions: WeakValueDictionary[Hashable, Session] = WeakValueDictionary()
_current: ContextVar[Context | None] = ContextVar("regrow_mindspore_session", default=None)


class Opened(ContextDecorator):
    """Open a context, ours and MindSpore's. May be entered again."""

    def __init__(self, session_id: Hashable, *, retain: bool, prefires: bool = False) -> None:
        self._id = session_id
        self._retain = retain
        self._prefires = prefires
        self._open: list[tuple[Context, Token[Context | None], Any]] = []

    def _recreate_cm(self) -> Opened:
        """Every call of a function that this decorates has a context of its own."""
        return Opened(self._id, retain=self._retain)

    def __enter__(self) -> None:
        outer = here()
        if outer is not None and outer.session.id != self._id:
            raise ValueError(errors.context_in_context(self._id, outer.session.id))
        with _control:
            session = _sessions.setdefault(self._id, Session(self._id))
            context = Context(session, retain=self._retain)
            session.contexts.append(context)
        if session.lets_go and not self._prefires:
            session.renew()
        session.lets_go |= not self._retain
        native = _compat.session_ctx(session.key, self._retain)
        native.__enter__()
        self._open.append((context, _current.set(context), native))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        context, token, native = self._open.pop()
        native.__exit__(None, None, None)
        with _control:
            context.session.contexts.remove(context)
        _current.reset(token)
        if isinstance(error, RuntimeError) and _READ_TWICE in str(error):
            raise CheckpointError(errors.read_twice(self._id)) from error


def here() -> Context | None:
    """The open context around this code. A copy of a thread's or a task's variables may name one that was left."""
    context = _current.get()
    return context if context is not None and context in context.session.contexts else None


def bind_new(frame: Frame) -> None:
    """A call made inside a context belongs to its session."""
    context = here()
    if context is not None:
        with _control:
            _bind(frame, context.session)


def adopt(frame: Frame) -> bool:
    """A call replayed inside a context belongs to its session from then on; FrameBusyError if another holds it.

    Returns:
        Whether a context is open.
    """
    context = here()
    if context is None:
        return False
    bind(frame, context.session.id)
    return True


def refuse_misplaced(session_id: Hashable) -> None:
    """Refuse a prefire where it may not stand."""
    context = here()
    if context is not None and context.session.id != session_id:
        raise ValueError(errors.prefire_in_context(session_id, context.session.id))
    if context is not None and not context.retain:
        raise ValueError(errors.prefire_let_go(session_id))


def bind(frame: Frame, session_id: Hashable) -> tuple[Session, bool]:
    """Bind a frame to a session by name; return the session, and whether the frame was free."""
    with _control:
        if frame.bound is not None and frame.bound.id != session_id:
            raise FrameBusyError(frame.label, frame.bound.id, session_id)
        was_free = frame.bound is None
        session = _sessions.setdefault(session_id, Session(session_id))
        _bind(frame, session)
        return session, was_free


def unbind(frame: Frame, session: Session) -> None:
    """Undo a binding: the frame is free for any session."""
    with _control:
        if frame.bound is session:
            frame.bound = None
        session.frames.discard(frame)


def clear(session_id: Hashable) -> None:
    """Release everything a session holds, and free its frames for others."""
    with _control:
        session = _sessions.get(session_id)
        if session is None:
            return
        for frame in session.frames:
            frame.bound = None
        session.frames.clear()
        session.lets_go = False
    _compat.clear_session(session.key)


def _bind(frame: Frame, session: Session) -> None:
    frame.bound = session
    session.frames.add(frame)
