"""What a stage does, told as events and as ranges for the profiler. Nothing is done where nobody listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns

from torch.profiler import record_function

from regrow._core import events
from regrow._core.events import Ran

Sender = tuple[str, int, int]


def told(kind: str, stage: int, micro_batch: int, awaits: Sender | None = None) -> AbstractContextManager[None]:
    """A context around one thing that a stage does for one micro-batch.

    Args:
        kind: as of `regrow._core.events.Ran`.
        stage: which.
        micro_batch: which.
        awaits: what sends that for which the rank waits meanwhile.
    """
    return _telling(kind, stage, micro_batch, awaits) if events.listeners else nullcontext()


@contextmanager
def _telling(kind: str, stage: int, micro_batch: int, awaits: Sender | None) -> Iterator[None]:
    began_ns = perf_counter_ns()
    try:
        with record_function(f"regrow {kind}: stage {stage}, micro-batch {micro_batch}"):
            yield
    finally:
        events.emit(Ran(kind, stage, micro_batch, began_ns, perf_counter_ns(), awaits))
