"""Stopwatch: how long a rank computes, taken from outside of whatever runs its stages. Must never change what runs.

|  forward  |.......|  dx  |  dw  |....|  prefire  |..|  dx  |  dw  |       . is idle: the rank waits for others
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

from torch.profiler import record_function

STEP = "regrow: step"
BACKWARD = "regrow: backward"

# What a stage is asked for in a step, and whether it is a part of backward. Only regrow's stage has a prefire.
_COMPUTES = {
    "forward_one_chunk": False,
    "prefire": False,
    "backward_one_chunk": True,
    "backward_weight_one_chunk": True,
    "perform_reduce_grad": False,
}


class Stopwatch:
    """The time in which at least one of the watched functions ran.

    Attributes:
        busy_s: so far.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._running = False

    def watch(self, stage: Any) -> None:
        """Time what a stage computes. Backward is marked for the profiler, too."""
        for name, is_backward in _COMPUTES.items():
            function = getattr(stage, name, None)
            if function is not None:
                setattr(stage, name, self.timed(_marked(function) if is_backward else function))

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed; called within another one that is, it is a part of that one's time."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return function(*args, **kwargs)
            self._running = True
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.busy_s += perf_counter() - start
                self._running = False

        return run


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(BACKWARD):
            return function(*args, **kwargs)

    return run
