"""What a stage does, told as events and as ranges for the profiler. Nothing is done where nobody listens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns
from typing import Any

from torch.profiler import record_function

from regrow._core import events
from regrow._core.events import Ran


def told(kind: str, stage: int, micro_batch: int, works: Sequence[Any] = ()) -> AbstractContextManager[None]:
    """A context around one thing that a stage does for one micro-batch.

    Args:
        kind: as of `regrow._core.events.Ran`.
        stage: which.
        micro_batch: which.
        works: receives that the rank will wait for next.
    """
    return _telling(kind, stage, micro_batch, works) if events.listeners else nullcontext()


@contextmanager
def _telling(kind: str, stage: int, micro_batch: int, works: Sequence[Any]) -> Iterator[None]:
    n_here = sum(work.is_completed() for work in works)
    began_ns = perf_counter_ns()
    try:
        with record_function(f"regrow {kind}: stage {stage}, micro-batch {micro_batch}"):
            yield
    finally:
        ended_ns = perf_counter_ns()
        n_came = sum(work.is_completed() for work in works) - n_here
        missing = len(works) - n_here - n_came
        events.emit(Ran(kind, stage, micro_batch, began_ns, ended_ns, bool(missing), bool(n_came)))
