"""The call of the engine under test, for the shared tests of sessions.

A block is given its weights as arguments where the engine is reentrant: passes of a session then ask for gradients of
weights as they do for inputs, which they cannot for what a reentrant call captures.
"""

from __future__ import annotations

from typing import Any

import regrow

chosen = {"use_reentrant": False}


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`regrow.checkpoint` of the engine under test."""
    if chosen["use_reentrant"] and hasattr(function, "weights"):
        return regrow.checkpoint(function, *args, *function.weights, **chosen, **kwargs)
    return regrow.checkpoint(function, *args, **chosen, **kwargs)
