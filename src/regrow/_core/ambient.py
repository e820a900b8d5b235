"""Ambient state: what a forward reads without being given it. One list, which users extend; must never hold a tensor.

RNG, autocast, grad mode and function modes are the environment's own. Here are the flags of the process, compared as
one value because they nearly always are what they were, and what `register_ambient` adds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from regrow import arguments
from regrow._core import flags_compat

Capture = Callable[[], Any]
Restore = Callable[[Any], AbstractContextManager[Any]]
Flags = tuple[Any, ...]

registrations: list[tuple[Capture, Restore]] = []


def register_ambient(capture: Capture, restore: Restore) -> Callable[[], None]:
    """Have every checkpointed call carry one more piece of ambient state from forward to its replays.

    For state that a function reads from its surroundings and that regrow does not know: recipes of low-precision
    training, contexts of context parallelism, random-number trackers of tensor parallelism.

    Args:
        capture: called in forward, before the function; returns the state, or None where there is nothing to restore.
            It runs once per checkpointed call, so it should be cheap.
        restore: called with that state for every replay; returns a context manager that puts it in force and takes it
            back. Restored in the order of registration, left in reverse.

    Returns:
        A function that takes the registration back. Calls made before still restore what they captured.

    Raises:
        ValueError: an argument cannot be called.

    Memory: a call holds what ``capture`` returned until its graph dies.

    Threads: register before training starts; ``capture`` runs on the thread of forward, ``restore`` on that of the
        replay.
    """
    arguments.check_callable("capture", capture, "a function without arguments")
    arguments.check_callable("restore", restore, "a function of the captured state")
    entry = (capture, restore)
    registrations.append(entry)

    def unregister() -> None:
        if entry in registrations:
            registrations.remove(entry)

    return unregister


def captured() -> tuple[tuple[Restore, Any], ...]:
    """What the registered captures find now."""
    found = ((restore, capture()) for capture, restore in registrations)
    return tuple((restore, state) for restore, state in found if state is not None)


def set_flags(wanted: Flags) -> None:
    """Make the flags of the process what `flags_compat.surroundings` said."""
    _, _, _, _, dtype, deterministic, warn_only, precision, *attention = wanted
    _, _, _, _, dtype_now, deterministic_now, warn_only_now, precision_now, *attention_now = flags_compat.surroundings()
    if dtype_now != dtype:
        torch.set_default_dtype(dtype)
    if (deterministic_now, warn_only_now) != (deterministic, warn_only):
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    if precision_now != precision and precision is not None:
        torch.set_float32_matmul_precision(precision)
    if attention_now != attention:
        flags_compat.set_attention_backends(tuple(attention))


def enter(stack: ExitStack, wanted: Flags, states: tuple[tuple[Restore, Any], ...]) -> None:
    """Put flags and registered states in force; the states are left when the stack is closed."""
    set_flags(wanted)
    for restore, state in states:
        stack.enter_context(restore(state))
