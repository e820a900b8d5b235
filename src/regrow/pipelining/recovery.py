"""Recovery: after a step that raised, neither replays nor torch's own per-step state may reach the next step.

Torch keeps losses, caches and receives of an aborted step. Its zero-bubble schedules then return gradients that are
silently wrong, since the stale loss has no graph any more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from regrow.pipelining import _compat
from regrow.pipelining.draining import drain
from regrow.pipelining.stage import PipelineStage

_log = logging.getLogger("regrow.pipelining")

_NOTE = (
    "regrow: this step was aborted on this rank, and not on every other one within {seconds:g} s. Messages in flight "
    "would reach the wrong step: destroy and rebuild the process group before the next step."
)
PEERS_S = 10.0  # how long a rank that raised waits to hear that the others did


def recover(schedule: Any, stages: dict[int, PipelineStage], error: BaseException, step: str) -> None:
    """Reset a schedule after its step raised; the exception says if messages are in flight.

    Args:
        schedule: what was attached.
        stages: those of its stages that are ours.
        error: what the step raised.
        step: a name for this step that all ranks agree on.
    """
    for stage in stages.values():
        stage.forget()
        if isinstance(stage.submod, DistributedDataParallel):
            _compat.reset_reducer(stage.submod)
    _compat.losses_of(schedule).clear()
    drained = _is_alone(stages.values())
    if not drained:
        _log.error(
            "a step raised; waiting up to %g s for the other ranks to say that theirs did", PEERS_S, exc_info=error
        )
        drained = _drain(schedule, stages, step)
    if isinstance(schedule, _compat.RuntimeSchedule):
        schedule.fwd_recv_ops.clear()
        schedule.bwd_recv_ops.clear()
        schedule.backward_counter.clear()
        _reshard(schedule)
    for stage in stages.values():
        stage.messages.clear()
    if not drained:
        _add_note(error, _NOTE.format(seconds=PEERS_S))


def _drain(schedule: Any, stages: dict[int, PipelineStage], step: str) -> bool:
    """Bring all messages to their end; False where that cannot be done."""
    if not isinstance(schedule, _compat.RuntimeSchedule) or len(stages) != len(_compat.stages_of(schedule)):
        return False  # what was sent and received cannot be told
    try:
        if not drain(list(stages.values()), step, PEERS_S):
            return False
        for waits in (schedule.fwd_recv_ops, schedule.bwd_recv_ops):
            for work in (work for works in waits.values() for work in works):
                work.wait()
    except RuntimeError:  # the group is broken already: it gave up waiting for a message
        _log.debug("messages of an aborted step could not be completed", exc_info=True)
        return False
    return True


def _is_alone(stages: Iterable[PipelineStage]) -> bool:
    return all(stage.group_size == 1 for stage in stages)


def _reshard(schedule: Any) -> None:
    schedule.unshard_ops.clear()
    for stage in _compat.stages_of(schedule):
        if stage.stage_index in schedule.unsharded_stages:
            for module in stage.submod.modules():
                if isinstance(module, _compat.FSDPModule):
                    module.reshard()
    schedule.unsharded_stages.clear()


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        _log.error(note)
