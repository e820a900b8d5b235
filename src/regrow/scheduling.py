"""The scheduling verbs: collect, prefire, open a session, clear it. Checks at the edge; _core does the work."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager

from regrow import arguments, errors
from regrow._core import collect, compat, session
from regrow._core.frame import Handle, frame_of


def recompute_handle_collector_ctx() -> AbstractContextManager[list[Handle]]:
    """A context that yields a list, which fills with one opaque handle per checkpointed call made inside.

    Handles come in forward order. A call whose forward raises is taken out again; calls that are plain (nothing needs
    a gradient) and calls made by a replay are not collected. Collectors nest: the innermost collects.

    Returns:
        The context manager.

    Raises:
        regrow.RegrowError: called inside a function of torch.compile; so do the other verbs but for clear.

    Memory: a handle keeps neither its call nor any tensor alive.

    Threads: collects calls made in the context (``contextvars``) that opened it.
    """
    _check_eager("recompute_handle_collector_ctx()")
    return collect.collector()


def recompute_handle(handle: Handle, session_id: Hashable) -> None:
    """Replay a checkpointed call now and keep what it brings back under a session. The caller's RNG does not move.

    A second call for the same session does nothing. Calls made inside the checkpointed function are checkpoints of
    their own with handles of their own: they are bound to the session with it and replayed when they are fired or read.
    Call it inside a retaining context of the same session, or outside any session context.

    Args:
        handle: from `recompute_handle_collector_ctx`.
        session_id: any hashable name; `recompute_session_ctx` and `clear_recompute_session` take the same.

    Raises:
        ValueError: a foreign handle, a bad id, or a context of another session or one that lets go is open.
        RuntimeError: the graph of the call has died, or its forward has not returned.
        regrow.CheckpointError: another session is active on the call (nothing is changed), the replay differs from
            forward, or an input was changed in place.

    Memory: the session holds the regrown tensors until they are read in a context that lets go, their graph dies, or
        `clear_recompute_session`. If the replay raises, nothing is held and the call is free for any session.

    Threads: any. The replay runs here, under a lock of the call.
    """
    _check_eager("recompute_handle()")
    arguments.check_session_id(session_id)
    if not isinstance(handle, Handle):
        raise ValueError(
            f"handle must come from recompute_handle_collector_ctx(), got {handle!r} of type {type(handle).__name__}."
        )
    if handle._saved_nothing:
        return
    frame = frame_of(handle)
    session.refuse_busy(frame, session_id)  # at once, without waiting for a replay that runs on another thread
    with frame.lock:
        bound, were_free = session.bind_nest(frame, session_id)
        try:
            frame.prefire(bound)
        except BaseException:
            session.unbind(were_free, bound)
            raise


def recompute_session_ctx(session_id: Hashable, retain_on_unpack: bool = False) -> AbstractContextManager[None]:
    """A context in which backward reads what a session holds, however many calls backward is cut into.

    A checkpointed call belongs to the session if it was prefired for it, or made while a context of it was open. The
    first backward that reaches such a call without a prefire replays it once; later passes read the same replay.

    Args:
        session_id: any hashable name.
        retain_on_unpack: True keeps what is read for the next pass, False lets each value go as it is read.

    Returns:
        The context manager. Contexts nest only with the same id; the inner ``retain_on_unpack`` holds inside.

    Raises:
        ValueError: a bad argument, or a context of another id is open.

    Memory: the session holds regrown tensors beyond the context, until `clear_recompute_session`.

    Threads: binds what is made in this context (``contextvars``); backward finds its session on any thread.
    """
    _check_eager("recompute_session_ctx()")
    arguments.check_session_id(session_id)
    arguments.check_flag("retain_on_unpack", retain_on_unpack)
    return session.Opened(session_id, retain=retain_on_unpack)


def clear_recompute_session(session_id: Hashable) -> None:
    """Free everything a session holds, read or not. Again, or for an unknown id, it does nothing.

    A later plain backward of the same graph works: it replays for itself, and runs again what selective checkpointing
    had kept.

    Args:
        session_id: the name of the session.

    Raises:
        ValueError: a bad id.

    Threads: any.
    """
    session.clear(arguments.check_session_id(session_id))


def _check_eager(verb: str) -> None:
    if compat.tracing() or callable(compat.compile_callback()):  # traced, or run in pieces after a graph break
        raise errors.RegrowError(errors.scheduled_while_compiling(verb))
