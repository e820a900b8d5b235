"""attach: places the replays of a schedule, and makes its step safe. Changes attributes of the one object it is given.

Torch's runtime posts the receive of a gradient early and waits for it at one place, where it takes the receive out of
``bwd_recv_ops``. A mapping of ours in that attribute is told just then, which is the moment to prefire:

    receive is posted ... other work ... taken out > PREFIRE > wait > backward
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from regrow.pipelining import _compat
from regrow.pipelining.plan import Keep, Plan, Retention
from regrow.pipelining.program import Program
from regrow.pipelining.stage import PipelineStage
from regrow.pipelining.stepping import Step

_log = logging.getLogger("regrow.pipelining")

# The step of each attached schedule; the schedule holds it.
_attached: WeakKeyDictionary[Any, ref[Step]] = WeakKeyDictionary()
_WAITS = ("bwd_recv_ops", "fwd_recv_ops")


def attach(
    schedule: Any,
    *,
    prefire: str = "on_wait",
    retention: Retention = "needed",
    keep: Keep = "auto",
    prefire_bytes: float | None = None,
) -> Any:
    """Place the replays of a schedule where its rank would wait, and leave nothing behind where a step raises.

    Args:
        schedule: a schedule of torch over stages of `PipelineStage`; others among its stages are left alone.
        prefire: "off": replays come when backward asks for them. "on_wait": a micro-batch's replay starts when the
            receive of its gradient was posted, before the rank blocks on it. "on_any_wait": also before it blocks on an
            activation that has not arrived, for the next backward in program order.
        retention: what stays between dx and dw. "all"; "needed": only what dw reads, learned from the first
            micro-batch, where a wrong guess costs one more replay; "none": nothing, dw replays again. Or a function
            of (stage_index, microbatch) that returns one of these.
        keep: "auto": micro-batches whose backward comes right after their forward on this rank are not dropped at all;
            "never"; or a function of (stage_index, microbatch) that returns whether to keep.
        prefire_bytes: what the prefire of a *full* backward may hold, in bytes, deepest calls first; the others come
            when backward asks for them. None: the deepest call only; ``math.inf``: no bound. A call that was never
            replayed before counts as the largest of its micro-batch so far.

    Returns:
        The same schedule.

    Raises:
        ValueError: a bad argument, a schedule without a `PipelineStage`, one that is attached already, or stages on
            ranks where the schedule does not look for them.

    Memory: prefired replays are held until their backward has read them; a step that raises lets go of everything.

    After a step that raised, the next step of the same schedule gives right gradients at world size 1, and on several
    ranks if every rank raised. If a peer has not, messages are in flight between them, and the exception carries a note
    that the process group must be rebuilt.

    A schedule with one stage per rank (torch's own ``Schedule1F1B``, ``ScheduleGPipe``) has no place for a prefire:
    its replays come when backward asks for them, one per call; `schedule_1f1b` has one.
    """
    plan = Plan(prefire=prefire, retention=retention, keep=keep, prefire_bytes=prefire_bytes)
    stages = _stages(schedule)
    if schedule in _attached:
        raise ValueError("schedule is attached already. Call detach(schedule) first to use other options.")
    _check_places(schedule, stages)
    program = Program(schedule, stages)
    if plan.prefire != "off":
        if isinstance(schedule, _compat.RuntimeSchedule):
            _hook_waits(schedule, program, plan)
        else:
            _log.warning(
                "%s posts and waits in one call, so there is no place for a prefire: each checkpointed call is "
                "replayed once, when backward asks for it. regrow.pipelining.schedule_1f1b has such a place.",
                type(schedule).__name__,
            )
    step = Step(schedule, stages, plan, program)
    schedule.step = step
    _attached[schedule] = ref(step)
    return schedule


def detach(schedule: Any) -> Any:
    """Undo `attach`: the schedule and its stages are as they were. On a schedule that is not attached it does nothing.

    Args:
        schedule: what was attached.

    Returns:
        The same schedule.

    Raises:
        ValueError: no schedule of torch, or none with a `PipelineStage`.
    """
    _stages(schedule)
    place = _attached.pop(schedule, None)
    step = None if place is None else place()
    if step is not None:
        step.attached = False
        if schedule.__dict__.get("step") is step:  # else other code has wrapped it, and calls through
            del schedule.step
            if step.before is not None:
                schedule.step = step.before
    for name in _WAITS:
        waits = schedule.__dict__.get(name)
        if isinstance(waits, _Waits):
            setattr(schedule, name, dict(waits))
    return schedule


def _check_places(schedule: Any, stages: dict[int, PipelineStage]) -> None:
    """A stage on a rank where its schedule does not look for it would take another one's messages."""
    ranks = getattr(schedule, "stage_index_to_group_rank", {})
    rank = next(iter(stages.values())).group_rank
    wanted = [index for index, place in ranks.items() if place == rank]
    if any(ranks.get(index, rank) != rank for index in stages):
        raise ValueError(
            f"schedule: {type(schedule).__name__} looks for the stages {wanted} on rank {rank}, which has made "
            f"{sorted(stages)}. Give each rank the stages that the schedule places there."
        )


class _Waits(dict[Any, Any]):
    """Receives that were posted, by (stage_index, microbatch). Tells before one is taken out to be waited for."""

    def __init__(self, posted: dict[Any, Any], before_wait: Callable[[tuple[int, int], Any], None]) -> None:
        super().__init__(posted)
        self._before_wait = before_wait

    def pop(self, key: tuple[int, int], *default: Any) -> Any:
        if key in self:
            self._before_wait(key, self[key])
        return super().pop(key, *default)


def _hook_waits(schedule: Any, program: Program, plan: Plan) -> None:
    for name in _WAITS:
        if type(schedule.__dict__.get(name)) is not dict:
            raise ValueError(
                f"schedule.{name} is {type(schedule.__dict__.get(name)).__name__}, not the dict that torch's runtime "
                "makes, so regrow cannot see its waits. Attach before other code replaces it."
            )
    schedule.bwd_recv_ops = _Waits(schedule.bwd_recv_ops, program.before_gradient)
    if plan.prefire == "on_any_wait":
        schedule.fwd_recv_ops = _Waits(schedule.fwd_recv_ops, program.before_activation)


def _stages(schedule: Any) -> dict[int, PipelineStage]:
    if not isinstance(schedule, _compat.Schedule):
        raise ValueError(
            f"schedule must be a schedule of torch.distributed.pipelining, got {schedule!r} of type "
            f"{type(schedule).__name__}."
        )
    stages = _compat.stages_of(schedule)
    ours = {stage.stage_index: stage for stage in stages if isinstance(stage, PipelineStage)}
    if not ours:
        kinds = ", ".join(sorted({type(stage).__module__ + "." + type(stage).__qualname__ for stage in stages}))
        raise ValueError(
            f"schedule has no stage that regrow knows, only {kinds}. "
            "Make its stages with regrow.pipelining.PipelineStage, which takes the same arguments."
        )
    return ours
