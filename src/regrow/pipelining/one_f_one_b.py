"""1F1B on torch's runtime for lists of actions, which has a seam for prefire; torch's own Schedule1F1B has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from regrow.pipelining import _compat


def schedule_1f1b(
    stage: PipelineStage, n_microbatches: int, loss_fn: Callable[..., torch.Tensor] | None = None, **options: Any
) -> Any:
    """One forward, one backward, with one stage per rank.

    Args:
        stage: this rank's stage, of regrow or of torch; there are as many stages as ranks in its group.
        n_microbatches: how many micro-batches a step has, at least 1.
        loss_fn: ``loss_fn(output, target)``.
        **options: as torch's schedules: ``scale_grads``, ``args_chunk_spec``, ``kwargs_chunk_spec``,
            ``output_merge_spec``.

    Returns:
        A schedule of torch, to be given to `attach`.

    Raises:
        ValueError: no stage of regrow, fewer than one micro-batch, or another number of stages than ranks.

    Source: PipeDream-Flush, arXiv 2006.09503.
    """
    if not isinstance(stage, PipelineStage):
        raise ValueError(f"stage must be one PipelineStage, got {stage!r} of type {type(stage).__name__}.")
    ranks = stage.group_size
    if isinstance(n_microbatches, bool) or not isinstance(n_microbatches, int) or n_microbatches < 1:
        raise ValueError(f"n_microbatches must be a number of at least 1, got {n_microbatches!r}.")
    if stage.num_stages != ranks:
        raise ValueError(
            f"stage: 1F1B needs one stage per rank, got {stage.num_stages} stages on {ranks} ranks. "
            "Use torch's ScheduleInterleaved1F1B for several stages per rank."
        )
    schedule = _compat.RuntimeSchedule([stage], n_microbatches, loss_fn, **options)
    actions = {rank: one_f_one_b(rank, ranks, n_microbatches) for rank in range(ranks)}
    _compat.set_actions(schedule, actions)
    return schedule


def one_f_one_b(rank: int, ranks: int, n_microbatches: int) -> list[Any]:
    """Warm-up, then one backward and one forward in turn, then the backwards that are left."""
    ahead = min(ranks - rank, n_microbatches)
    actions = [_compat.Action(rank, _compat.FORWARD, index) for index in range(ahead)]
    for index in range(n_microbatches):
        actions.append(_compat.Action(rank, _compat.FULL_BACKWARD, index))
        if ahead + index < n_microbatches:
            actions.append(_compat.Action(rank, _compat.FORWARD, ahead + index))
    return actions
