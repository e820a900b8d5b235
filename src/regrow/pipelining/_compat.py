"""The private names of torch.distributed.pipelining, and why. Must never hold behaviour of ours.

A name that is missing is found here, when regrow.pipelining is imported, and named with the version that lacks it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.nn.parallel import DistributedDataParallel

from regrow._core import compat


def _private(module: str, path: str, why: str) -> Any:
    return compat._private(f"torch.distributed.pipelining.{module}", path, why)


# What every schedule is, those with one stage per rank, and those that run a list of actions.
# Deleted by public base classes.
Schedule: Any = _private("schedules", "_PipelineSchedule", "attach checks what it is given")
SingleStageSchedule: Any = _private("schedules", "PipelineScheduleSingle", "it has no seam for prefire")
RuntimeSchedule: Any = _private("schedules", "_PipelineScheduleRuntime", "it runs lists of actions, with a seam")
_lower: Any = _private(
    "schedules", "_PipelineScheduleRuntime._prepare_schedule_with_comms", "1F1B is lowered onto that runtime"
)

# The actions of those lists. Deleted by a public intermediate representation.
Action: Any = _private("schedules", "_Action", "1F1B is written as a list of actions")
_kind: Any = _private("schedules", "_ComputationType", "backward is found in lists of actions")
FORWARD, FULL_BACKWARD, BACKWARD_INPUT = _kind.FORWARD, _kind.FULL_BACKWARD, _kind.BACKWARD_INPUT
BACKWARD_WEIGHT, OVERLAP = _kind.BACKWARD_WEIGHT, _kind.OVERLAP_F_B
COMPUTE = frozenset({FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})

# The methods of a stage that ours overrides: a renamed one would silently not be overridden.
# Deleted by public extension points of a stage.
for _name, _why in (
    ("_compute_outputs", "the first step infers shapes without checkpoints"),
    ("forward_one_chunk", "forward collects handles"),
    ("backward_one_chunk", "backward reads what was replayed"),
    ("backward_weight_one_chunk", "so does its second half"),
    ("backward_maybe_with_nosync", "regrow splits backward itself"),
    ("get_fwd_send_ops", "an aborted step knows what it sent"),
    ("get_bwd_send_ops", "an aborted step knows what it sent"),
    ("get_fwd_recv_ops", "an aborted step knows what it waits for"),
    ("get_bwd_recv_ops", "an aborted step knows what it waits for"),
    ("get_local_bwd_output", "evaluation on neighbouring stages has no gradients"),
    ("set_local_bwd_input", "evaluation on neighbouring stages has no gradients"),
    ("clear_runtime_states", "every step starts clean"),
):
    _private("stage", f"PipelineStage.{_name}", _why)


def stages_of(schedule: Any) -> list[Any]:
    """The stages that a schedule runs on this rank. Deleted by a public attribute."""
    return [schedule._stage] if isinstance(schedule, SingleStageSchedule) else list(schedule._stages)


def n_microbatches_of(schedule: Any) -> int:
    """How many micro-batches a step has. Deleted by a public attribute."""
    count: int = schedule._n_microbatches
    return count


def actions_of(schedule: Any) -> list[Any]:
    """What a schedule runs on this rank, in order; nothing where it has no list. Deleted by a public representation."""
    lists = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None) or {}
    return lists.get(stages_of(schedule)[0].group_rank) or []


def set_actions(schedule: Any, actions: dict[int, list[Any]]) -> None:
    """Have a schedule run lists of computations, one per rank. Deleted by a public constructor from lists."""
    schedule.pipeline_order = actions
    _lower(schedule, actions)


def losses_of(schedule: Any) -> list[torch.Tensor]:
    """The losses of the running step, which torch keeps when it is aborted. Deleted by a reset of torch's own."""
    losses: list[torch.Tensor] = schedule._internal_losses
    return losses


def metas_of(stage: Any, kind: str) -> list[Any]:
    """Shape and type of what a stage takes ("input"), sends "forward" or "backward"; None where it sends nothing.

    Deleted by a public description of a stage's messages.
    """
    metas = stage._stage_meta
    return list({"input": metas.inputs, "forward": metas.outputs, "backward": metas.input_grads}[kind] or ())


compat._private("torch.distributed", "Reducer._reset_state", "replicas forget a backward that was aborted")


def reset_reducer(module: DistributedDataParallel) -> None:
    """Have replicas forget a backward that was aborted, which they would wait for. Deleted by a public reset."""
    module.reducer._reset_state()


# Where ranks that aborted a step find each other, past the messages in flight. Deleted by a public getter.
def store(prefix: str) -> Any:
    """The store of the default process group, under a prefix of one's own."""
    return PrefixStore(prefix, _get_default_store())


FSDPModule: Any = _private("stage", "FSDPModule", "stages may be sharded")
