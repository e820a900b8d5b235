"""A schedule of torch from its name, over the stages of this rank. Must never choose between variants."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import pipelining as torch_pipelining

from regrow.pipelining import schedule_1f1b

Loss = Callable[..., Any]


def make_schedule(name: str, stages: Sequence[Any], n_micro_batches: int, loss: Loss) -> Any:
    """The schedule.

    Args:
        name: one of `kinds.KINDS`.
        stages: this rank's, as many as the schedule takes.
        n_micro_batches: of a step.
        loss: of one micro-batch.
    """
    makers: dict[str, Callable[..., Any]] = {
        "gpipe": _of_one(torch_pipelining.ScheduleGPipe),
        "1f1b": _of_one(schedule_1f1b),
        "looped-bfs": torch_pipelining.ScheduleLoopedBFS,
        "interleaved-1f1b": torch_pipelining.ScheduleInterleaved1F1B,
        "interleaved-zb": torch_pipelining.ScheduleInterleavedZeroBubble,
        "zbv": torch_pipelining.ScheduleZBVZeroBubble,
        "dualpipev": torch_pipelining.ScheduleDualPipeV,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own remarks on its own schedules
        return makers[name](list(stages), n_micro_batches, loss_fn=loss)


def _of_one(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda stages, n, **options: make(stages[0], n, **options)
