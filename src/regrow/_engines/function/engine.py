"""Engine: one call in forward, without a graph. What it leaves behind is a frame, and one node that owns it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from regrow import errors
from regrow._core import collect, compat, events, leaks, replaying, returned, scope, session, telling, trees
from regrow._core.closures import cells_of
from regrow._core.environment import Environment, uncached
from regrow._core.faults import InputChangedError
from regrow._core.frame import Handle
from regrow._core.inputs import Inputs
from regrow._core.reach import Reach, reach
from regrow._core.scope import ReentrantHandle
from regrow._core.state import State
from regrow._engines.function import _compat, data_parallel, outputs
from regrow._engines.function.node import node_of
from regrow._engines.function.replay import ReentrantFrame, ReentrantOptions

Entries = list[tuple[list[Handle], Handle]]


def run(
    function: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: ReentrantOptions
) -> Any:
    """Run a call so that its activations are dropped and can be regrown. A plain call where nothing is recorded."""
    here = replaying.thread.here
    if here.reentrant:
        raise ValueError(errors.nested_reentrant(label))
    outer = here.replay
    if (
        not torch.is_grad_enabled()
        or here.plain
        or (compat.functorch_active() and compat.transform_level() > (0 if outer is None else outer.transforms))
    ):
        return function(*args, **kwargs)
    tensors, template = trees.flatten(args, kwargs)
    environment = Environment(tensors, preserve_rng=options.preserve_rng_state)
    inputs = Inputs(tensors, template)
    frame = ReentrantFrame(function, label, inputs, environment, options)
    _look_around(frame, template.opaque)
    if _compat.active_wrapper() is not None:
        frame.wrapper = data_parallel.around()
    entries = _enter(frame, tensors, here)
    around, here.forward, here.reentrant = here.forward, frame, True
    try:
        silent = inputs.need_grad or (frame.state is not None and frame.state.needs_grad)
        output = _silently(frame, args, kwargs) if silent else function(*args, **kwargs)
        if environment.sleeping is not None:
            environment.check_devices(label)
        # Out of the engine's sight there may be a parameter that needs a gradient: what was recorded tells.
        if silent or _grafted(frame) or any(tensor.requires_grad for tensor in trees.tensors_in(output)):
            return _joined(frame, tensors, output, recorded=not silent)
    except BaseException:
        _discard(frame, entries)
        raise
    finally:
        here.forward, here.reentrant = around, False
    _discard(frame, entries)
    return output


def _look_around(frame: ReentrantFrame, opaque: tuple[Any, ...]) -> None:
    if events.listeners:
        frame.began_ns = perf_counter_ns()
    cells = cells_of(frame.function)
    if cells is not None:
        frame.cells = cells
    reached = reach(frame.function, opaque, cells)
    if reached is not None:
        if reached.tensors:
            _refuse_captured_graph(frame.label, reached)
        frame.state = State(reached, opaque)
        frame.environment.include(frame.state.tensors)
        weight = frame.state.with_graph(reached)
        if weight is not None:
            raise ValueError(errors.captured_graph(frame.label, weight))
        buffer = leaks.with_grad(frame.state.modules)
        if buffer is not None:
            raise ValueError(errors.buffer_with_grad(frame.label, buffer))


def _refuse_captured_graph(label: str, reached: Reach) -> None:
    """The graph of a replay would run on into the graph that such a tensor comes from."""
    for name, tensor in reached.tensors.values():
        if tensor.requires_grad and not tensor.is_leaf:
            raise ValueError(errors.captured_graph(label, name))


def _enter(frame: ReentrantFrame, tensors: list[torch.Tensor], inside: replaying.Here) -> Entries:
    """Hand out the handle of a call, to the collector and to the scope, and bind the call to the open session."""
    entries: Entries = []
    if inside.forward is not None:
        frame.around = inside.forward
    if inside.replay is not None:
        frame.outer = inside.replay
        return entries
    if inside.forward is not None:
        inside.forward.add_inner(frame)
    collected = None if collect.innermost.get() is None else collect.add(frame, ReentrantHandle)
    if collected is not None:
        entries.append(collected)
    here = scope.innermost.get()
    if here is not None:
        frame.parameters = here.are_parameters(tensors)
        frame.lean, frame.asks = here.automatic, not here.automatic
        handle = entries[0][1] if entries else ReentrantHandle(frame)
        here.handles.append(handle)
        entries.append((here.handles, handle))
    if session.current.get() is not None:
        session.bind_new(frame)
    if here is not None or frame.bound is not None:
        frame.split = True
        frame.trigger = torch.empty(0, device="cpu", requires_grad=True)
    return entries


def _silently(frame: ReentrantFrame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward without a graph. Weights that are cast or computed here have none, so nobody may find them in a cache."""
    compat.set_grad_enabled(False)
    try:
        if not frame.environment.casts and not _compat.caches_weights():
            return frame.function(*args, **kwargs)
        with uncached(), _compat.own_weights():
            return frame.function(*args, **kwargs)
    finally:
        compat.set_grad_enabled(True)


def _joined(frame: ReentrantFrame, tensors: list[torch.Tensor], output: Any, *, recorded: bool) -> Any:
    """The output of forward as the output of one node."""
    returned.note(frame)
    if frame.inputs.changed_with_grad:
        raise InputChangedError(frame.label, *frame.inputs.changes)
    if type(output) is torch.Tensor and not output.requires_grad and not output._is_view():
        frame.fresh = (output.detach(),)  # what most calls return
        joined, template = node_of(frame, tensors), None
    else:
        found, template = outputs.taken_apart(frame.label, output)
        frame.fresh = outputs.aliases(found, recorded=recorded)
        joined = node_of(frame, tensors)
    if frame.began_ns:
        telling.forward(frame, frame.began_ns, in_replay=frame.outer is not None)
    return joined[0] if template is None else template.fill(list(joined))[0][0]


def _grafted(frame: ReentrantFrame) -> bool:
    """Whether a SAVE region has parameters: its output carries no graph here."""
    grafts = (entry.region.graft for entry in frame.regions or ())
    return any(graft is not None and graft.trigger is not None for graft in grafts)


def _discard(frame: ReentrantFrame, entries: Entries) -> None:
    for entry in entries:
        collect.discard(entry)
    if frame.bound is not None:
        session.unbind([frame], frame.bound)
