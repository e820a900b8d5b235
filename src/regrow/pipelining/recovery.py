"""Recovery: after a step that raised, neither replays nor torch's own per-step state may reach the next step.

Torch keeps losses, caches and receives of an aborted step. Its zero-bubble schedules then return gradients that are
silently wrong, since the stale loss has no graph any more.
"""

from __future__ import annotations

import logging
from typing import Any

from regrow.pipelining import _compat
from regrow.pipelining.stage import PipelineStage

_log = logging.getLogger("regrow.pipelining")

_NOTE = (
    "regrow: this step was aborted with {count} receives posted that no message came for. Peers that did not raise "
    "cannot go on, and messages in flight would reach the wrong step: destroy and rebuild the process group before the "
    "next step."
)


def recover(schedule: Any, stages: dict[int, PipelineStage], error: BaseException) -> None:
    """Reset a schedule after its step raised; the exception says if messages are in flight."""
    for stage in stages.values():
        stage.forget()
    schedule._internal_losses.clear()
    if not isinstance(schedule, _compat.RuntimeSchedule):
        return
    posted = [
        work for waits in (schedule.fwd_recv_ops, schedule.bwd_recv_ops) for works in waits.values() for work in works
    ]
    schedule.fwd_recv_ops.clear()
    schedule.bwd_recv_ops.clear()
    schedule.backward_counter.clear()
    _reshard(schedule)
    in_flight = sum(not work.is_completed() for work in posted)
    if in_flight:
        _add_note(error, _NOTE.format(count=in_flight))


def _reshard(schedule: Any) -> None:
    schedule.unshard_ops.clear()
    for stage in schedule._stages:
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
