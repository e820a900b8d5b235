"""Early stop: end a replay as soon as every saved tensor is back. Must never leave an operator half done.

The signal is raised inside the pack hook of the last saved tensor, so not even the operator that saved it runs. Two
kinds of operators must finish first, and the signal is raised at the next torch call instead:

- a custom Function: unwinding it leaves its context in a cycle with its outputs, which nothing collects;
- an operator that saved a tensor without gradient, since it may still be writing it (the noise of RReLU).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from regrow._core import compat, trees

# None where torch calls a custom Function without a frame of Python in between, as 2.14 does.
_FUNCTION_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)

_ATTRIBUTE_ACCESS = frozenset({"__get__", "__set__", "__delete__"})

# How many of the last saved tensors are watched: no operator of torch saves more in front of its last one than this
# and still writes them.
WATCHED = 4


class Stop(BaseException):
    """Ends a replay. Not an Exception, so that user code that catches those does not swallow it."""


def call_site(caller: FrameType) -> tuple[int, int]:
    """Which operator call this Python frame is in: the same for everything that one operator saves."""
    return id(caller), caller.f_lasti


def must_finish(caller: FrameType) -> bool:
    """Whether the operator that this Python frame calls is a custom Function."""
    return caller.f_code is _FUNCTION_APPLY


def stop_at_next_call(caller: FrameType, depth: int) -> None:
    """Let the operator that this Python frame calls finish, and stop at the next torch call.

    Args:
        caller: the frame that called the operator.
        depth: how many function modes this thread had when the function began.
    """
    above = compat.swap_function_modes(depth, ())
    compat.swap_function_modes(depth, (_StopAtNextCall(caller), *above))


class _StopAtNextCall(TorchFunctionMode):
    """Stops once, at the first call with tensors after the operator that was running.

    What passes: calls that the operator itself makes (dispatch modes call it again, in-place operators set attributes)
    and calls that restore state on the way out.
    """

    def __init__(self, caller: FrameType) -> None:
        super().__init__()
        self._caller = caller
        self._site = call_site(caller)
        self._raised = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Stop instead of running the call."""
        if not self._raised and self._operator_is_done(func) and trees.tensors_in([args, kwargs]):
            self._raised = True
            raise Stop
        return func(*args, **(kwargs or {}))

    def _operator_is_done(self, func: Callable[..., Any]) -> bool:
        if getattr(func, "__name__", "") in _ATTRIBUTE_ACCESS:
            return False
        # In a loop the same line calls again; then it calls directly, not from within the operator.
        return call_site(self._caller) != self._site or sys._getframe(2) is self._caller
