"""Passes: what one arrival of backward at a call means, and what the call gives. Must never guess a gradient.

whole     every target is wanted: replay, run backward through it, keep nothing
dx        the trigger is not among the targets: gradients of the inputs, parameters untouched, the graph stays
dw        it is, after a dx: gradients of the parameters, from what dx kept
limited   not a whole backward, and the call is in no scope and no session: only where no parameter is captured
"""

from __future__ import annotations

import torch

from regrow import errors
from regrow._core import compat, events, session, telling
from regrow._core.faults import CheckpointError
from regrow._core.frame import Owner
from regrow._core.lifecycle import Reason
from regrow._core.scope import Phase
from regrow._engines.function import _compat, data_parallel
from regrow._engines.function.graph import Grads, Graph, whole
from regrow._engines.function.replay import OWN, SHARED_TRIGGER, ReentrantFrame

_SHARED = _compat.accumulator_of(SHARED_TRIGGER)


def arrive(frame: ReentrantFrame, node: torch.autograd.graph.Node, grads: Grads) -> tuple[torch.Tensor | None, Grads]:
    """Backward has come to a call.

    Args:
        frame: the call.
        node: its node in the graph that backward runs through.
        grads: the gradients of its outputs; None where an output has none.

    Returns:
        The gradient of the trigger, and those of the inputs.
    """
    if frame.released:
        raise RuntimeError(errors.let_go_frame(frame.label))
    if torch.is_grad_enabled() or compat.functorch_active():
        raise CheckpointError(errors.second_order(frame.label), label=frame.label)
    owner = _owner(frame)
    if events.listeners:
        telling.asked(frame, OWN if owner is None else owner)
    try:
        if owner is None:
            if frame.regions is None:
                return frame.trigger.detach() if frame.split else None, _alone(frame, node, grads)
            with frame.lock:  # regions have one place for what a replay of its own brings back
                return frame.trigger.detach() if frame.split else None, _alone(frame, node, grads)
        return frame.trigger.detach(), _for_owner(frame, node, grads, owner)
    except _RefusedError as refusal:
        raise refusal.error from None
    except BaseException:
        if frame.active_session is None or frame.consume:
            frame.let_go()
        raise


class _RefusedError(Exception):
    """Backward may not do this here; the call is as it was."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _owner(frame: ReentrantFrame) -> Owner | None:
    """Who keeps a replay for more than this arrival; None for nobody."""
    active = frame.active_session
    if active is not None:
        return active.session if type(active) is session.Unread else active
    if frame.bound is not None:
        session.refuse_foreign_context(frame)
    if frame.asks:
        if frame.phase is None:
            raise CheckpointError(errors.phase_missing(frame.label), label=frame.label)
        return OWN
    return None


def _alone(frame: ReentrantFrame, node: torch.autograd.graph.Node, grads: Grads) -> Grads:
    trigger = node.next_functions[0][0] if frame.split else _SHARED
    keeps = compat.graph_task_keeps_graph()
    if not compat.is_wanted(trigger):
        return _limited(frame, node, grads, keeps=keeps)
    graph = frame.graphs.get(OWN)
    if graph is None and frame.wrapper is not None:
        graph = frame.keep(OWN, scheduled=False)
    if graph is None:
        outputs, leaves = frame.once()
        try:
            found = whole(frame.label, outputs, leaves, grads, compare=frame.compares)
        finally:
            frame.release(OWN, Reason.ENDED)
    else:
        graph.check(grads)
        found = _full(frame, graph, grads, keep=False)
        frame.release(OWN, Reason.ENDED)
    if not keeps:
        frame.let_go()
    return found


def _limited(frame: ReentrantFrame, node: torch.autograd.graph.Node, grads: Grads, *, keeps: bool) -> Grads:
    graph = frame.graphs.get(OWN) or frame.keep(OWN, scheduled=False)
    n_captured = len(graph.captured())
    if n_captured:
        frame.release(OWN, Reason.ENDED)
        raise _RefusedError(CheckpointError(errors.limited_backward(frame.label, n_captured), label=frame.label))
    graph.check(grads)
    found = graph.through(grads, _wanted(node))
    frame.release(OWN, Reason.ENDED)
    if not keeps:
        frame.let_go()
    return found


def _for_owner(frame: ReentrantFrame, node: torch.autograd.graph.Node, grads: Grads, owner: Owner) -> Grads:
    # Asked for nothing but inputs, dw is not meant yet; told to be dx, a whole backward is none.
    both = frame.phase is not Phase.DX and compat.is_wanted(node.next_functions[0][0])
    with frame.lock:
        graph = frame.graphs.get(owner)
        starts = both and graph is not None and graph.had(grads)
        if graph is not None and graph.trimmed and not starts:
            # Another pass through a call that dw has not come to, and what dx alone reads was let go.
            again = object()
            graph = frame.keep(again, scheduled=False)
            try:
                return _through(frame, node, graph, grads, owner, both=both)
            finally:
                frame.release(again, Reason.ENDED)
        if graph is None:
            graph = frame.keep(owner, scheduled=owner is not OWN)
    graph.check(grads)
    if starts:
        found = graph.dw()
        _finish(frame, owner)
        return found
    return _through(frame, node, graph, grads, owner, both=both)


def _through(
    frame: ReentrantFrame, node: torch.autograd.graph.Node, graph: Graph, grads: Grads, owner: Owner, *, both: bool
) -> Grads:
    """A pass that does not start from what a dx kept."""
    graph.check(grads)
    if both:
        retains = owner is not OWN and not frame.consume
        found = _full(frame, graph, grads, keep=retains, only=_wanted(node) if frame.lean else None)
        if not retains:
            _finish(frame, owner)
        return found
    wanted = _wanted(node)
    if frame.phase is Phase.DW:
        return graph.through(grads, wanted)
    wanted = [want and index not in frame.parameters for index, want in enumerate(wanted)]
    if graph.is_cut or frame.graphs.get(owner) is not graph:
        return graph.through(grads, wanted)
    found = graph.dx(grads, wanted, keep=not frame.lean, compare=not frame.lean and not frame.asks)
    if owner is OWN:
        graph.trim()
    elif frame.consume:
        frame.release(owner, Reason.ENDED)
    return found


def _finish(frame: ReentrantFrame, owner: Owner) -> None:
    """Parameters have their gradients: the replay is over, and the call as well, unless backward keeps its graph."""
    frame.release(owner, Reason.ENDED)
    if frame.phase is Phase.DW or not compat.graph_task_keeps_graph():
        frame.let_go()


def _full(frame: ReentrantFrame, graph: Graph, grads: Grads, *, keep: bool, only: list[bool] | None = None) -> Grads:
    if frame.wrapper is not None:
        data_parallel.refuse_shared(frame.label, frame.wrapper, graph)
    return graph.full(grads, keep=keep, only=only)


def _wanted(node: torch.autograd.graph.Node) -> list[bool]:
    """Which inputs of a call this backward wants the gradient of."""
    return [before is not None and compat.is_wanted(before) for before, _ in node.next_functions[1:]]
