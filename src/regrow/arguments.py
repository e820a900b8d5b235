"""Checks of arguments that every platform shares. Must never import torch or mindspore."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

DETERMINISM_CHECKS = ("default", "none")


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


def check_pair(value: Any, source: Callable[..., Any]) -> tuple[Any, Any]:
    """Refuse a ``context_fn`` that does not give two context managers."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or not all(hasattr(ctx, "__enter__") and hasattr(ctx, "__exit__") for ctx in pair):
        raise ValueError(
            f"context_fn must return a pair of context managers (forward, recompute); {source!r} returned {value!r}."
        )
    return pair[0], pair[1]
