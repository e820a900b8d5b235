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
            return None, _alone(frame, node, grads)
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
    found = graph.dx(grads, _wanted(node), keep=False, compare=False)
    frame.release(OWN, Reason.ENDED)
    if not keeps:
        frame.let_go()
    return found


def _for_owner(frame: ReentrantFrame, node: torch.autograd.graph.Node, grads: Grads, owner: Owner) -> Grads:
    with frame.lock:
        graph = frame.graphs.get(owner)
        if graph is not None and graph.trimmed and not _starts_dw(frame, node, graph, grads):
            return _through_again(frame, node, grads)
        if graph is None:
            graph = frame.keep(owner, scheduled=owner is not OWN)
    graph.check(grads)
    if compat.is_wanted(node.next_functions[0][0]) and frame.phase is not Phase.DX:
        return _dw(frame, graph, grads, owner)
    return _dx(frame, node, graph, grads, owner)


def _starts_dw(frame: ReentrantFrame, node: torch.autograd.graph.Node, graph: Graph, grads: Grads) -> bool:
    return (
        frame.phase is not Phase.DX
        and graph.has_dx
        and graph.had(grads)
        and compat.is_wanted(node.next_functions[0][0])
    )


def _dx(frame: ReentrantFrame, node: torch.autograd.graph.Node, graph: Graph, grads: Grads, owner: Owner) -> Grads:
    wanted = [want and index not in frame.parameters for index, want in enumerate(_wanted(node))]
    found = graph.dx(grads, wanted, keep=not frame.lean, compare=not frame.lean and not frame.asks)
    if owner is OWN:
        graph.trim()
    elif frame.consume:
        frame.release(owner, Reason.ENDED)
    return found


def _dw(frame: ReentrantFrame, graph: Graph, grads: Grads, owner: Owner) -> Grads:
    keeps = compat.graph_task_keeps_graph()
    if graph.has_dx and graph.had(grads):
        found = graph.dw()
        frame.release(owner, Reason.ENDED)
        if not keeps or frame.phase is Phase.DW:
            frame.let_go()
        return found
    retains = owner is not OWN and not frame.consume
    found = _full(frame, graph, grads, keep=retains)
    if not retains:
        frame.release(owner, Reason.ENDED)
        if not keeps or frame.phase is Phase.DW:
            frame.let_go()
    return found


def _full(frame: ReentrantFrame, graph: Graph, grads: Grads, *, keep: bool) -> Grads:
    if frame.wrapper is not None:
        data_parallel.refuse_shared(frame.label, frame.wrapper, graph)
    return graph.full(grads, keep=keep)


def _through_again(frame: ReentrantFrame, node: torch.autograd.graph.Node, grads: Grads) -> Grads:
    """Another pass through a call that dw has not come to yet, after what only dx reads was let go."""
    owner = object()
    graph = frame.keep(owner, scheduled=False)
    try:
        graph.check(grads)
        if compat.is_wanted(node.next_functions[0][0]) and frame.phase is not Phase.DX:
            return _full(frame, graph, grads, keep=False)
        return graph.dx(grads, _wanted(node), keep=False, compare=False)
    finally:
        frame.release(owner, Reason.ENDED)


def _wanted(node: torch.autograd.graph.Node) -> list[bool]:
    """Which inputs of a call this backward wants the gradient of."""
    return [before is not None and compat.is_wanted(before) for before, _ in node.next_functions[1:]]
