"""Sessions: a name under which several backwards share one replay. Registry, lock, bind, activate, clear.

The control lock guards bookkeeping only: no user code and no replay runs under it, and no tensor dies there.
A session knows frames as something with ``bound`` and ``release``.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from weakref import WeakSet, WeakValueDictionary

from regrow import errors
from regrow._core import events, replaying, telling
from regrow._core.faults import FrameBusyError
from regrow._core.frame import Frame
from regrow._core.lifecycle import Reason


class Session:
    """One owner of replays.

    Attributes:
        id: the caller's name for it.
        frames: the calls bound to it, weakly.
        contexts: the open contexts, each with its ``retain_on_unpack``; the last one counts.
    """

    __slots__ = ("__weakref__", "contexts", "frames", "id")

    def __init__(self, session_id: Hashable) -> None:
        self.id = session_id
        self.frames: WeakSet[Frame] = WeakSet()
        self.contexts: list[Context] = []

    def activate(self, frame: Frame) -> None:
        """Tell a frame whether a context is open, and whether reads let go."""
        open_here = self if self.contexts else None
        frame.active_session = Unread(self) if open_here is not None and events.listeners else open_here
        frame.consume = bool(self.contexts) and not self.contexts[-1].retain


class Unread:
    """Stands for a session on a call until the first read in a context; only while somebody listens.

    It is nobody's owner, so the first read takes the slow path, where it is noted, and the others read fields.
    """

    __slots__ = ("session",)

    def __init__(self, session: Session) -> None:
        self.session = session


class Context:
    """One open ``recompute_session_ctx``."""

    __slots__ = ("retain", "session")

    def __init__(self, session: Session, *, retain: bool) -> None:
        self.session = session
        self.retain = retain


_control = threading.RLock()
# Weakly: a session lives as long as a frame is bound to it or a context of it is open, so ids never pile up.
_sessions: WeakValueDictionary[Hashable, Session] = WeakValueDictionary()
current: ContextVar[Context | None] = ContextVar("regrow_session", default=None)


class Opened(ContextDecorator):
    """Open a context: frames of the session read its values until the context is left. May be entered again."""

    def __init__(self, session_id: Hashable, *, retain: bool) -> None:
        self._id = session_id
        self._retain = retain
        self._open: list[tuple[Context, Token[Context | None]]] = []

    def _recreate_cm(self) -> Opened:
        """Every call of a function that this decorates has a context of its own."""
        return Opened(self._id, retain=self._retain)

    def __enter__(self) -> None:
        outer = _here()
        if outer is not None and outer.session.id != self._id:
            raise ValueError(errors.context_in_context(self._id, outer.session.id))
        with _control:
            session, is_new = _get(self._id)
            context = Context(session, retain=self._retain)
            session.contexts.append(context)
            _activate_all(session)
        if is_new and events.listeners:
            telling.session_opened(session)
        self._open.append((context, current.set(context)))

    def __exit__(self, *error: object) -> None:
        context, token = self._open.pop()
        session = context.session
        with _control:
            session.contexts.remove(context)
            _activate_all(session)
        current.reset(token)  # last: it refuses to be left in another context than it was entered in


def bind_new(frame: Frame) -> None:
    """A call made inside a context belongs to its session, unless a replay makes it."""
    context = _here()
    if context is None or replaying.thread.here.replay is not None:
        return
    with _control:
        _bind(frame, context.session)


def refuse_busy(frame: Frame, session_id: Hashable) -> None:
    """Refuse a prefire where it may not stand, and one for a frame that another session holds."""
    context = _here()
    if context is not None and context.session.id != session_id:
        raise ValueError(errors.prefire_in_context(session_id, context.session.id))
    if context is not None and not context.retain:
        raise ValueError(errors.prefire_let_go(session_id))
    bound = frame.bound
    if bound is not None and bound.id != session_id:
        raise FrameBusyError(frame.label, bound.id, session_id)


def bind_nest(frame: Frame, session_id: Hashable) -> tuple[Session, list[Frame]]:
    """Bind a frame, and the frames inside it, to a session by name; return the session, and which were free before."""
    nest = frame.nest()
    with _control:
        for each in nest:
            if each.bound is not None and each.bound.id != session_id:
                raise FrameBusyError(each.label, each.bound.id, session_id)
        session, is_new = _get(session_id)
        free = [each for each in nest if each.bound is None]
        for each in free:
            _bind(each, session)
    if is_new and events.listeners:
        telling.session_opened(session)
    return session, free


def unbind(frames: Iterable[Frame], session: Session) -> None:
    """Undo a binding: the frames are free for any session."""
    with _control:
        for frame in frames:
            if frame.bound is session:
                frame.bound = frame.active_session = None
                frame.consume = False
                session.frames.discard(frame)


def refuse_foreign_context(frame: Frame) -> None:
    """A frame that one session holds cannot serve a backward in the context of another. Not for the hot path."""
    context = _here()
    bound = frame.bound
    if context is not None and bound is not None and bound is not context.session:
        raise FrameBusyError(frame.label, bound.id, context.session.id)


def clear(session_id: Hashable) -> None:
    """Release everything a session holds, and free its frames for others."""
    if events.listeners:
        telling.session_cleared(session_id)
    with _control:
        session = _sessions.get(session_id)
        if session is None:
            return
        frames = list(session.frames)
        session.frames.clear()
        for frame in frames:
            frame.bound = frame.active_session = None
            frame.consume = False
    for frame in frames:
        frame.release(session, Reason.CLEARED)
        frame.forget()


def read(frame: Frame, unread: Unread) -> Session:
    """The first read of a call in a context: note it, and have the others read fields."""
    telling.asked(frame, unread.session)
    with _control:
        if frame.active_session is unread:
            frame.active_session = unread.session
    return unread.session


def _get(session_id: Hashable) -> tuple[Session, bool]:
    """The session of that name, and whether it is a new one. Under the control lock."""
    fresh = Session(session_id)
    session = _sessions.setdefault(session_id, fresh)
    return session, session is fresh


def _here() -> Context | None:
    """The open context around this code. A copy of a thread's or a task's variables may name one that was left."""
    context = current.get()
    return context if context is not None and context in context.session.contexts else None


def _bind(frame: Frame, session: Session) -> None:
    frame.bound = session
    session.frames.add(frame)
    session.activate(frame)


def _activate_all(session: Session) -> None:
    for frame in session.frames:
        session.activate(frame)
