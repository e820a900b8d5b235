"""Checks of arguments that every platform shares. Must never import torch or mindspore."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

VALUE_CHECKS = ("values", "sample")
DETERMINISM_CHECKS = ("default", "none", *VALUE_CHECKS)


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True and False: a truthy string is a typo, not a choice."""
    if value is not True and value is not False:
        raise ValueError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}.")


def check_count(name: str, value: object) -> None:
    """Refuse anything but a whole number of at least one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r} of type {type(value).__name__}.")


def check_callable(name: str, value: object, role: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise ValueError(f"{name} must be {role}, got {value!r} of type {type(value).__name__}, which is not callable.")


def check_determinism(value: object) -> None:
    """Refuse an unknown name of a check."""
    if value not in DETERMINISM_CHECKS:
        allowed = ", ".join(repr(name) for name in DETERMINISM_CHECKS)
        raise ValueError(f"determinism_check must be one of {allowed}, got {value!r}.")


def check_session_id(value: object) -> Hashable:
    """Refuse an id the caller could not name again."""
    if value is None:
        raise ValueError(
            "session_id must name the session, got None. Use any hashable value that you can name again, "
            'such as ("micro_batch", 3).'
        )
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"session_id must be hashable, got {value!r} of type {type(value).__name__}. "
            'Use a string, a number or a tuple such as ("micro_batch", 3).'
        ) from None
    same = value == value  # noqa: PLR0124
    if same is not True:
        raise ValueError(
            f"session_id must be equal to itself, got {value!r} of type {type(value).__name__}, so no later call could "
            'name the session. Use a string, a number or a tuple such as ("micro_batch", 3).'
        )
    return value


def check_options(
    *,
    preserve_rng_state: bool,
    context_fn: Callable[[], tuple[Any, Any]] | None,
    policy_fn: Callable[..., Any] | None,
    determinism_check: str,
    debug: bool,
    early_stop: bool,
    respect_saved_tensors_hooks: bool | None,
) -> None:
    """Refuse options of a call that mean nothing on any platform."""
    check_flag("preserve_rng_state", preserve_rng_state)
    check_flag("debug", debug)
    check_flag("early_stop", early_stop)
    if respect_saved_tensors_hooks is not None:
        check_flag("respect_saved_tensors_hooks", respect_saved_tensors_hooks)
    if context_fn is not None:
        check_callable("context_fn", context_fn, "a function that returns two context managers")
    if policy_fn is not None:
        check_callable("policy_fn", policy_fn, "a function policy_fn(ctx, op, *args, **kwargs)")
    check_determinism(determinism_check)


def check_names(options: Iterable[str], allowed: tuple[str, ...]) -> None:
    """Refuse options that no call has."""
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no option of checkpoint. The options are {', '.join(allowed)}.")


def missing_function(kwargs: Iterable[str]) -> str:
    """The sentence for arguments of a function that is not there."""
    return f"function is missing: checkpoint() got {', '.join(sorted(kwargs))} for it, but not the function."


def label_of(function: Callable[..., Any]) -> str:
    """How messages name a function or module."""
    name: str | None = getattr(function, "__qualname__", None)
    return type(function).__name__ if name is None else name


def check_pair(value: Any, source: Callable[..., Any]) -> tuple[Any, Any]:
    """Refuse a ``context_fn`` that does not give two context managers."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or not all(hasattr(ctx, "__enter__") and hasattr(ctx, "__exit__") for ctx in pair):
        raise ValueError(
            f"context_fn must return a pair of context managers (forward, recompute); {source!r} returned {value!r}."
        )
    return pair[0], pair[1]
