"""Engine: one call in forward. What it leaves behind is a frame; what backward does with it begins in unpack."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter_ns
from typing import Any

import torch

from regrow import arguments, errors
from regrow._core import collect, compat, events, replaying, returned, session, telling, trees
from regrow._core.closures import cells_of
from regrow._core.environment import Environment
from regrow._core.faults import CheckpointError
from regrow._core.inputs import Inputs
from regrow._core.kept import Kept
from regrow._core.lifecycle import Replay
from regrow._core.reach import reach
from regrow._core.selective import Keep, Recall, create_selective_checkpoint_contexts
from regrow._core.state import State
from regrow._engines.hooks import slots
from regrow._engines.hooks.mismatch import Evidence
from regrow._engines.hooks.pack import make_pack
from regrow._engines.hooks.replay import HooksFrame, Options
from regrow._engines.hooks.unpack import make_unpack

DEFAULTS = Options()  # what nearly every call has


class Call(HooksFrame):
    """The frame with the hooks of its forward."""

    def hooks(self) -> compat.Hooks:
        """The hooks of forward, for what else saves tensors in its name."""
        return make_pack(self), make_unpack(self)


def run(
    function: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Run a call so that its activations are dropped and can be regrown. A plain call where nothing is recorded."""
    here = replaying.thread.here
    outer = here.replay
    if not torch.is_grad_enabled() or here.plain or (compat.functorch_active() and _is_transformed(outer)):
        return function(*args, **kwargs)
    frame = _frame(function, label, args, kwargs, options, here)
    began_ns = perf_counter_ns() if events.listeners else 0
    around = here.forward
    environment = frame.environment
    contexts = () if options is DEFAULTS else _contexts(frame, options)
    entry = None if collect.innermost.get() is None else collect.add(frame)
    if session.current.get() is not None:
        session.bind_new(frame)
    here.forward = frame
    try:
        output = _forward(frame, contexts, args, kwargs)
        if environment.sleeping is not None:
            environment.check_devices(label)
        returned.note(frame)
    except BaseException:
        _discard(frame, entry)
        raise
    finally:
        here.forward = around
    if not slots.live_count(frame.saved):
        _leave_nothing(frame, entry, output)
    elif began_ns:
        telling.forward(frame, began_ns, in_replay=outer is not None)
    return output


def _frame(
    function: Callable[..., Any],
    label: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    here: replaying.Here,
) -> HooksFrame:
    tensors, template = trees.flatten(args, kwargs)
    environment = Environment(tensors, preserve_rng=options.preserve_rng_state)
    frame = Call(function, label, Inputs(tensors, template), environment, options)
    if here.forward is not None:
        frame.around = here.forward
    if here.replay is not None:
        frame.outer = here.replay
    elif here.forward is not None:
        here.forward.add_inner(frame)
    cells = cells_of(function)
    if cells is not None:
        frame.cells = cells
    reached = reach(function, template.opaque, cells)
    if reached is not None:
        frame.state = State(reached, template.opaque)
        environment.include(frame.state.tensors)
    return frame


def _forward(
    frame: HooksFrame, contexts: tuple[AbstractContextManager[Any], ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    pack = make_pack(frame)
    if compat.hooks_are_searched:
        compat.mark_hooks(pack, forward=True)
    compat.push_hooks(pack, make_unpack(frame))
    try:
        if not contexts:
            return frame.function(*args, **kwargs)
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return frame.function(*args, **kwargs)
    finally:
        compat.pop_hooks()
        if compat.hooks_are_searched:
            compat.unmark_hooks(pack)
    raise CheckpointError(errors.suppressed_exception(frame.label), label=frame.label)


def _contexts(frame: HooksFrame, options: Options) -> tuple[AbstractContextManager[Any], ...]:
    """What to enter around forward; what to enter around a replay is left in the frame."""
    pairs: list[tuple[Any, Any]] = []
    if options.context_fn is not None:
        pairs.append(arguments.check_pair(options.context_fn(), options.context_fn))
        if isinstance(pairs[0][0], compat.TorchSelectiveMode):
            frame.foreign_contexts = True
            pairs[0][0].respect_saved_tensors_hooks = options.respect_saved_tensors_hooks  # read from torch 2.14 on
    if options.policy_fn is not None:
        pairs.append(create_selective_checkpoint_contexts(options.policy_fn))
    if options.respect_saved_tensors_hooks is False:
        frame.respects_hooks = False
    hooks = compat.user_hooks() if frame.respects_hooks else None
    for index, (forward, replay) in enumerate(pairs):
        if isinstance(forward, Keep) and isinstance(replay, Recall):
            kept = Kept(frame.label, hooks, preserve_rng=options.preserve_rng_state)
            pairs[index] = Keep(forward.policy, kept), Recall(kept)  # of this call alone, whoever made the pair
            frame.kept += (kept,)
    values = options.determinism_check in arguments.VALUE_CHECKS
    if options.debug or values:
        frame.evidence = Evidence.taken(
            frame.function,
            frame.inputs.opaque,
            frame.inputs.tensors(),
            lists=options.debug,
            sample=options.determinism_check == "sample" if values else None,
        )
        pairs.append((frame.evidence.log, None))
    frame.contexts = tuple(replay for _, replay in pairs if replay is not None)
    return tuple(forward for forward, _ in pairs)


def _is_transformed(outer: Replay | None) -> bool:
    """Whether a torch.func transform is around the call; one around a whole replay, a vmapped backward, is not."""
    return compat.transform_level() > (0 if outer is None else outer.transforms)


def _leave_nothing(frame: HooksFrame, entry: Any, output: Any) -> None:
    """Nothing was saved that backward could ask for."""
    if any(tensor.requires_grad for tensor in trees.tensors_in(output)):
        collect.mark_empty(entry)
    else:
        _discard(frame, entry)


def _discard(frame: HooksFrame, entry: Any) -> None:
    collect.discard(entry)
    if frame.bound is not None:
        session.unbind([frame], frame.bound)
