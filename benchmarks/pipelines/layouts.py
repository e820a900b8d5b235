"""The schedules, and which stages of each lie on which rank. Must never know what a stage computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from regrow.pipelining import schedule_1f1b


@dataclass(frozen=True, slots=True)
class Layout:
    """A schedule, how many stages it wants on a rank, and in which order they go over the ranks."""

    name: str
    make: Callable[..., Any]
    stages_per_rank: int
    v: bool = False  # there and back again; otherwise round and round
    runtime: bool = True  # runs a list of actions, which has a place for a prefire

    def n_stages(self, n_ranks: int) -> int:
        """How many stages there are."""
        return self.stages_per_rank * n_ranks

    def stages_of(self, rank: int, n_ranks: int) -> list[int]:
        """The stages on a rank, first to last."""
        if self.v:
            return [rank, 2 * n_ranks - 1 - rank]
        return [rank + turn * n_ranks for turn in range(self.stages_per_rank)]

    def schedule(self, stages: list[Any], n_microbatches: int, loss_fn: Callable[..., Any]) -> Any:
        """The schedule over the stages of one rank."""
        return self.make(stages if self.stages_per_rank > 1 else stages[0], n_microbatches, loss_fn=loss_fn)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("torch-1F1B", Schedule1F1B, 1, runtime=False),
        Layout("1F1B", schedule_1f1b, 1),
        Layout("LoopedBFS", ScheduleLoopedBFS, 2),
        Layout("Interleaved1F1B", ScheduleInterleaved1F1B, 2),
        Layout("InterleavedZB", ScheduleInterleavedZeroBubble, 2),
        Layout("ZBV", ScheduleZBVZeroBubble, 2, v=True),
        Layout("DualPipeV", ScheduleDualPipeV, 2, v=True),
    )
}
