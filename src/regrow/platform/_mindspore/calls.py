"""A checkpointed call on MindSpore: its options checked, handed to MindSpore's recompute. Must never replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from regrow import arguments, errors
from regrow.platform._mindspore import _compat, collecting, inputs, randomness, reach, records, sessions
from regrow.platform._mindspore.faults import CheckpointError
from regrow.platform._mindspore.frames import Frame, Handle, alive
from regrow.platform._mindspore.inputs import Inputs
from regrow.platform._mindspore.replays import Surroundings, runs_again

OPTION_NAMES = (
    "use_reentrant",
    "preserve_rng_state",
    "context_fn",
    "policy_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "respect_saved_tensors_hooks",
)


@dataclass(frozen=True, slots=True)
class Options:
    """What of the options of a call means something here."""

    preserve_rng_state: bool
    context_fn: Callable[[], tuple[Any, Any]] | None
    early_stop: bool


def check_options(
    *,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    policy_fn: Callable[..., Any] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
) -> Options:
    """Checked options of a call; ValueError names what is wrong, NotImplementedError what MindSpore lacks."""
    arguments.check_flag("use_reentrant", use_reentrant)
    arguments.check_options(
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        policy_fn=policy_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
    )
    if use_reentrant:
        raise NotImplementedError(
            errors.mindspore_lacks(
                "use_reentrant=True",
                "its reentrant recompute has no handles and no sessions",
                "Leave use_reentrant at False, or call mindspore.recompute(cell, ..., use_reentrant=True) without a "
                "scheduler.",
            )
        )
    if policy_fn is not None:
        raise NotImplementedError(
            errors.mindspore_lacks(
                "policy_fn",
                "its recompute replays every operator of the function",
                "Checkpoint smaller functions, and leave what is to be kept outside of them.",
            )
        )
    if debug:
        raise NotImplementedError(
            errors.mindspore_lacks(
                "debug=True",
                "nothing tells of the operators that it runs",
                "Leave debug at False; print in the function where regrow.is_recomputing() is True.",
            )
        )
    return Options(preserve_rng_state, context_fn, early_stop)


def run(
    function: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Run a call with checked options."""
    if not _compat.records():
        return function(*args, **kwargs)
    _check_mode()
    frame = Frame(label)
    with ExitStack() as stack:
        state = None
        if options.preserve_rng_state:
            _check_repeatable(label, function, args, kwargs)
            state = stack.enter_context(randomness.repeatable())
        sessions.bind_new(frame)
        entry = collecting.add(frame)
        try:
            output, record = _forward(function, frame, args, kwargs, options, Surroundings(frame, state))
        except BaseException:
            collecting.discard(entry)
            raise
    frame.finish(record)
    if not records.count(record):
        if any(tensor._requires_grad for tensor in inputs.tensors_of(output)):
            collecting.mark_empty(entry)
        else:
            collecting.discard(entry)
    return output


def prefire(handle: Any, session_id: Hashable) -> None:
    """Replay now, and keep what it brings back under a session."""
    if not isinstance(handle, Handle):
        raise ValueError(errors.foreign_handle(handle))
    if handle._saved_nothing:
        return
    frame, record = alive(handle)
    sessions.refuse_misplaced(session_id)
    with frame.lock:
        session, was_free = sessions.bind(frame, session_id)
        try:
            with sessions.Opened(session_id, retain=True, prefires=True):
                record.recompute(session.key)
        except BaseException:
            if was_free:
                sessions.unbind(frame, session)
            raise


def _forward(
    function: Callable[..., Any],
    frame: Frame,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    around_replays: Surroundings,
) -> tuple[Any, Any]:
    """Have MindSpore run the function; what it returns, and MindSpore's record of the call."""
    source = options.context_fn
    contexts = (nullcontext(), nullcontext()) if source is None else arguments.check_pair(source(), source)
    tensors, given = inputs.taken_apart(args, kwargs)
    body = _body(function, frame, given, contexts)
    with _compat.collector_ctx() as found:
        output = _compat.recompute(
            body,
            *tensors,
            use_reentrant=False,
            early_stop=options.early_stop,
            context_fn=lambda: (nullcontext(), around_replays),
            save_rng_state=False,  # MindSpore would not put the caller's back after an early stop
        )
    return output, found[0]  # calls that the function made come after it


def _body(function: Callable[..., Any], frame: Frame, given: Inputs, contexts: tuple[Any, Any]) -> Callable[..., Any]:
    """The function, of its tensors alone. Holds the frame, no tensor."""
    forward_context, replay_context = contexts

    def body(*tensors: Any) -> Any:
        again = runs_again(frame)
        record = frame.record() if again else None
        if record is not None and record.input_node is None:  # else they come out of a saved tensor, newly made
            given.check(frame.label, tensors)
        args, kwargs = given.filled(tensors)
        with replay_context if again else forward_context:
            return function(*args, **kwargs)
        raise CheckpointError(errors.suppressed_exception(frame.label), label=frame.label)

    return body


def _check_mode() -> None:
    mindspore = _compat.mindspore
    if mindspore.get_context("mode") != mindspore.PYNATIVE_MODE:
        raise NotImplementedError(
            errors.mindspore_lacks(
                "graph mode",
                "a compiled graph has no handles and no sessions",
                "Call mindspore.set_context(mode=mindspore.PYNATIVE_MODE), or use cell.recompute() without a "
                "scheduler.",
            )
        )


def _check_repeatable(label: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse cells whose random numbers a replay could not draw again."""
    found = randomness.unrepeatable(reach.cells(function, args, kwargs))
    if found:
        raise NotImplementedError(errors.unrepeatable_cells(label, found))
