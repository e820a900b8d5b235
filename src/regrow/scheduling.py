"""The scheduling verbs: collect, prefire, open a session, clear it. Checks at the edge; _core does the work."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from regrow import arguments, errors
from regrow._core import collect, compat, scope, session
from regrow._core.carrier import carry
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


def recompute_handle(handle: Handle, session_id: Hashable, carrier: bool = False) -> None:
    """Replay a checkpointed call now and keep what it brings back under a session. The caller's RNG does not move.

    A second call for the same session does nothing. Calls made inside the checkpointed function are checkpoints of
    their own with handles of their own: they are bound to the session with it and replayed when they are fired or read.
    Call it inside a retaining context of the same session, or outside any session context.

    Under FSDP2 the replay needs what FSDP2 gathers. A call that is checkpointed around the sharded module gathers it
    again, and wants ``carrier=True``; one that is checkpointed inside the sharded module finds only shards until its
    backward begins: that is logged, and the call is replayed when backward asks.

    On an accelerator the replay is queued on the stream that is current here. If that is not forward's, it runs beside
    what forward's stream is given from now on: it begins when what that stream holds by now is done, and whoever reads
    first waits for it, on its own stream and on forward's. Until then, nothing that the replay reads may be written in
    place by work that does not wait. A call of the reentrant engine is replayed on forward's stream in any case.

    Args:
        handle: from `recompute_handle_collector_ctx`.
        session_id: any hashable name; `recompute_session_ctx` and `clear_recompute_session` take the same.
        carrier: replay inside a small backward of its own, so that FSDP2 and other code that asks whether a backward
            runs takes the replay for part of one: parameters that are gathered stay gathered for the backward to come,
            and the order of forward is not noted a second time.

    Raises:
        ValueError: a foreign handle, a bad id or flag, or a context of another session or one that lets go is open.
        RuntimeError: the graph of the call has died, or its forward has not returned.
        regrow.CheckpointError: another session is active on the call (nothing is changed), the replay differs from
            forward, or an input was changed in place.

    Memory: the session holds the regrown tensors until they are read in a context that lets go, their graph dies, or
        `clear_recompute_session`. If the replay raises, nothing is held and the call is free for any session.

    Threads: any. The replay runs here, under a lock of the call.
    """
    _check_eager("recompute_handle()")
    arguments.check_session_id(session_id)
    arguments.check_flag("carrier", carrier)
    if not isinstance(handle, Handle):
        raise ValueError(errors.foreign_handle(handle))
    if handle._saved_nothing:
        return
    frame = frame_of(handle)
    session.refuse_busy(frame, session_id)  # at once, without waiting for a replay that runs on another thread
    with frame.lock:
        bound, were_free = session.bind_nest(frame, session_id)
        try:
            if carrier:
                carry(partial(frame.prefire, bound))
            else:
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


def reentrant_checkpoint_scope(parameters: scope.Source) -> AbstractContextManager[list[Handle]]:
    """A context in which the backward of calls with ``use_reentrant=True`` can be cut into dx and dw.

    It yields a list that fills with one `regrow.ReentrantHandle` per such call made inside, in forward order. Before
    each half, say which it is, on every handle; in the second half, name the triggers among the targets::

        with reentrant_checkpoint_scope(model.parameters()) as handles:
            output = model(x)
        for handle in handles:
            handle.set_phase("dx")
        dx = torch.autograd.grad(output, x, gradient, retain_graph=True)
        triggers = [handle.backward_trigger for handle in handles]
        for handle in handles:
            handle.set_phase("dw")
        dw = torch.autograd.grad(output, [*parameters_used_outside, *triggers], gradient)

    Parameters that a call captures accumulate into ``.grad`` in dw, as in ``backward()``; those given to it as
    arguments get theirs returned. dw starts from what dx kept, so the gradient of the output must be that of dx. A dw
    without a dx before it computes both.

    Args:
        parameters: an iterable of tensors, or a function that returns one, which is called once, for the first call
            inside. It tells parameters among the arguments of calls from activations.

    Returns:
        The context manager.

    Raises:
        ValueError: ``parameters`` gives anything but tensors, or a scope is open already.

    Memory: from dx to dw a call holds what dw reads of its replay, one gradient per place where parameters join, and
        the gradients of its inputs; after dw nothing. A handle keeps nothing alive.

    Threads: for calls made in the context (``contextvars``) that opened it; backward may run on any thread.

    Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
    """
    return _scope(scope.Scope(scope.check_source(parameters)))


@contextmanager
def _scope(new: scope.Scope) -> Iterator[list[Handle]]:
    with scope.opened(new):
        yield new.handles


def _check_eager(verb: str) -> None:
    if compat.tracing() or callable(compat.compile_callback()):  # traced, or run in pieces after a graph break
        raise errors.RegrowError(errors.scheduled_while_compiling(verb))
