"""Programs: what every rank of a schedule runs in which order, as torch lowered it. Without processes or tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn

from layouts import Layout
from regrow.pipelining import PipelineStage


class Kind(Enum):
    """What an action does. Receives are posted early and cost nothing, so they are left out."""

    FORWARD = "forward"
    FULL = "full backward"
    DX = "dx"
    DW = "dw"
    SEND_FORWARD = "send an activation"
    SEND_BACKWARD = "send a gradient"


_KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.FULL,
    "BACKWARD_INPUT": Kind.DX,
    "BACKWARD_WEIGHT": Kind.DW,
    "SEND_F": Kind.SEND_FORWARD,
    "SEND_B": Kind.SEND_BACKWARD,
}
BACKWARDS = (Kind.FULL, Kind.DX)
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does to one micro-batch on one stage."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def key(self) -> tuple[int, int]:
        """Stage and micro-batch."""
        return self.stage, self.microbatch


@dataclass(frozen=True, slots=True)
class Programs:
    """What all ranks run."""

    n_stages: int
    rank_of: dict[int, int]  # by stage
    actions: list[list[Action]]  # by rank

    def computed(self, rank: int) -> list[Action]:
        """What a rank computes, in order."""
        return [action for action in self.actions[rank] if action.kind not in _SENDS]


class _StandIn(PipelineStage):
    """As much of a stage as a schedule looks at when it is made. Without a process group, so never set up as one."""

    def __init__(self, stage_index: int, num_stages: int, n_ranks: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.group_size, self.group_rank = n_ranks, 0
        self.submod = nn.Identity()


def programs_of(layout: Layout, n_ranks: int, n_microbatches: int) -> Programs:
    """The programs of a schedule that runs lists of actions. A schedule knows the lists of all its ranks.

    Raises:
        ValueError: torch has no such schedule for this many ranks and micro-batches.
    """
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    n_stages = layout.n_stages(n_ranks)
    stages = [_StandIn(index, n_stages, n_ranks) for index in layout.stages_of(0, n_ranks)]
    lists = layout.schedule(stages, n_microbatches, lambda *_: None).pipeline_order_with_comms
    return Programs(
        n_stages,
        {stage: rank for rank in range(n_ranks) for stage in layout.stages_of(rank, n_ranks)},
        [list(_read(lists[rank])) for rank in range(n_ranks)],
    )


def _read(actions: Any) -> Iterator[Action]:
    for action in actions:
        if action.sub_actions is not None:
            yield from _read(action.sub_actions)
        elif action.computation_type.name in _KINDS:
            yield Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
