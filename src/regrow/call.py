"""checkpoint(): the drop-in signature. Checks arguments and chooses an engine; must never do what an engine does."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

from regrow import arguments
from regrow._core import compat
from regrow._engines import native
from regrow._engines.function import engine as reentrant
from regrow._engines.function.replay import ReentrantOptions
from regrow._engines.hooks import engine as hooks
from regrow._engines.hooks.engine import DEFAULTS
from regrow._engines.hooks.replay import Options

OPTION_NAMES = tuple(Options.__dataclass_fields__)
REENTRANT = ReentrantOptions()  # what nearly every reentrant call has


Params = ParamSpec("Params")
Result = TypeVar("Result")


@overload
def checkpoint(
    function: Callable[..., Result],
    *args: Any,
    use_reentrant: bool = ...,
    preserve_rng_state: bool = ...,
    context_fn: Callable[[], tuple[Any, Any]] | None = ...,
    policy_fn: Callable[..., Any] | None = ...,
    determinism_check: str = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    respect_saved_tensors_hooks: bool | None = ...,
    **kwargs: Any,
) -> Result: ...
@overload
def checkpoint(
    *,
    use_reentrant: bool = ...,
    preserve_rng_state: bool = ...,
    context_fn: Callable[[], tuple[Any, Any]] | None = ...,
    policy_fn: Callable[..., Any] | None = ...,
    determinism_check: str = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    respect_saved_tensors_hooks: bool | None = ...,
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]: ...
def checkpoint(  # noqa: PLR0913 - torch's signature
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    policy_fn: Callable[..., Any] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a function without keeping its activations; regrow them when backward, or a scheduler, asks.

    A drop-in for ``torch.utils.checkpoint.checkpoint``: same values, same gradients. Without
    a positional argument it is a decorator, also for methods; the parentheses are required::

        @checkpoint(early_stop=False)
        def block(x): ...

    Under ``no_grad``, ``inference_mode`` and ``torch.func`` transforms, and where nothing needs a gradient, it is a
    plain call. While torch.compile or export traces, it is torch's own checkpoint with the same arguments.

    Args:
        function: what to run; it runs again for every replay, so it must do the same again.
        *args: its positional arguments. Containers known to torch's pytree are taken apart, and a replay gets fresh
            ones as forward saw them.
        use_reentrant: False for the engine on saved-tensor hooks, which does all that is said here. True for the one on
            an autograd Function: the lowest cost in forward, for whole first-order backwards and, inside
            `regrow.reentrant_checkpoint_scope` or a session, for split ones. It takes no ``context_fn``, ``policy_fn``
            or ``debug``; its replays always run the whole function, whatever ``early_stop`` is; its determinism check
            compares outputs.
        preserve_rng_state: replays draw the random numbers of forward, and leave the caller's generators untouched.
        context_fn: returns two context managers, for forward and for replays.
        policy_fn: selective checkpointing: a value of `regrow.policies`, or ``policy_fn(ctx, op, *args, **kwargs)``
            that returns a ``torch.utils.checkpoint.CheckpointPolicy`` or a bool: True keeps the operator's result.
            Composes with ``context_fn``: contexts are entered in that order and left in reverse.
        determinism_check: "default" compares number, shape, dtype and device of the regrown tensors with forward's,
            "none" only the number. "values" compares the bits of what each operator returned, too, and names the first
            that computed others; "sample" those of up to 127 elements of each. The function must then run the same
            operators in the same order. Slow: each result is read once more in forward and in the replay (see
            docs/tools.md); 16 MiB are needed for it at a time.
        debug: keep the operators of both runs, and say in the error of a mismatch where they part. It finds no
            mismatch that the determinism check does not find. Slow.
        early_stop: end a replay as soon as every saved tensor is back, so that code after the last one does not run
            again. If a custom Function saved it, or an operator that may still write what it saved, the replay goes on
            to the next torch call. torch's global ``set_checkpoint_early_stop`` does not change it, nor does
            ``set_checkpoint_debug_enabled`` change ``debug``.
        respect_saved_tensors_hooks: whether results kept by a policy pass through saved-tensor hooks that surround the
            call, such as ``save_on_cpu``. None means True. Torch's own selective contexts are told; they have a choice
            from torch 2.14 on, where None warns.
        **kwargs: keyword arguments of the function.

    Returns:
        What the function returns, or a decorator.

    Raises:
        ValueError: a bad option, or ``context_fn`` that returns no pair. With ``use_reentrant=True``: the function
            returns no tensor, captures one with a graph of its own, or another reentrant call is inside it.
        RuntimeError: a device was first initialised inside the function.
        regrow.CheckpointError: from backward: the replay differs from forward, or an input was changed in place. From
            the call: it is made inside a scheduled replay, or the forward context swallowed an exception.

    Memory: holds the inputs from the call until the graph of the output dies; with ``use_reentrant=True`` until a
        backward that does not retain the graph has passed, if that is earlier. Regrown tensors live until they are
        read, their backward ends, or their session is cleared; a graph node that dies frees its own at once.

    Threads: backward may run on any thread. A replay runs on the thread that asked for it, under a lock of the call.

    Source: torch 2.13, utils/checkpoint.py; the decorator form and ``respect_saved_tensors_hooks`` are torch 2.14's.
    """
    if (
        (use_reentrant is False or use_reentrant is True)
        and preserve_rng_state is True
        and context_fn is None
        and policy_fn is None
        and respect_saved_tensors_hooks is None
        and determinism_check is DEFAULTS.determinism_check
        and debug is False
        and early_stop is True
    ):
        # What nearly every call has, without building it again.
        options: Options | ReentrantOptions = REENTRANT if use_reentrant else DEFAULTS
    else:
        options = check_options(
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            policy_fn=policy_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        )
    if function is None:
        if args or kwargs:
            raise ValueError(arguments.missing_function(kwargs))
        return _decorator(options)
    if not callable(function):
        arguments.check_callable("function", function, "the function or module to run")  # type: ignore[unreachable]
    return run(function, arguments.label_of(function), args, kwargs, options)


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
) -> Options | ReentrantOptions:
    """Checked options of a call; ValueError names what is wrong."""
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
        unable = {
            "context_fn": context_fn is not None,
            "policy_fn": policy_fn is not None,
            "debug": debug,
            f"determinism_check={determinism_check!r}": determinism_check in arguments.VALUE_CHECKS,
        }
        if any(unable.values()):
            given = ", ".join(name for name, is_given in unable.items() if is_given)
            raise ValueError(
                f"{given}: not with use_reentrant=True, which keeps and compares no saved tensors. "
                "Leave use_reentrant at False for selective checkpointing, contexts, the operator log and values."
            )
        return ReentrantOptions(preserve_rng_state=preserve_rng_state, determinism_check=determinism_check)
    return Options(
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        policy_fn=policy_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
    )


def _decorator(options: Options | ReentrantOptions) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        arguments.check_callable("function", function, "the function to decorate")

        @wraps(function)
        def checkpointed(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            output: Result = run(function, arguments.label_of(function), args, kwargs, options)
            return output

        return checkpointed

    return decorate


def run(
    function: Callable[..., Any],
    label: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options | ReentrantOptions,
) -> Any:
    """Run a call with checked options."""
    if compat.tracing():
        return native.run(function, args, kwargs, _as_torch_has_them(options))
    if type(options) is ReentrantOptions:
        return reentrant.run(function, label, args, kwargs, options)
    assert isinstance(options, Options)
    return hooks.run(function, label, args, kwargs, options)


def _as_torch_has_them(options: Options | ReentrantOptions) -> dict[str, Any]:
    if isinstance(options, ReentrantOptions):  # a tracer sees the whole backward, so there is only one engine
        options = Options(preserve_rng_state=options.preserve_rng_state, determinism_check=options.determinism_check)
    return {name: getattr(options, name) for name in OPTION_NAMES}
