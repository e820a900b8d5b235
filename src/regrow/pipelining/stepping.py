"""Stepping: a step of an attached schedule. The plan holds as long as it takes, and an exception leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import ref

from regrow.pipelining.plan import Plan
from regrow.pipelining.program import Program
from regrow.pipelining.recovery import recover
from regrow.pipelining.stage import PipelineStage
from regrow.pipelining.told import told

# All ranks attach the same schedules in the same order, and take the same steps.
_serials = count()


class Step:
    """What stands in for ``schedule.step``.

    Attributes:
        before: what stood there, if it was set on the schedule itself.
        attached: False once the schedule was detached; then a step is the schedule's own. Other code may still hold it.
    """

    def __init__(self, schedule: Any, stages: dict[int, PipelineStage], plan: Plan, program: Program) -> None:
        self._schedule = ref(schedule)  # which holds this
        self._stages = stages
        self._plan = plan
        self._program = program
        self.before: Callable[..., Any] | None = schedule.__dict__.get("step")
        self.attached = True
        self._serial = next(_serials)
        self._steps = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step."""
        schedule = self._schedule()
        assert schedule is not None
        step = self.before or type(schedule).step.__get__(schedule)
        if not self.attached:
            return step(*args, **kwargs)
        self._steps += 1
        for stage in self._stages.values():
            stage.follow(self._plan, self._program.follows)
        try:
            with told("step", -1, -1):
                return step(*args, **kwargs)
        except BaseException as error:
            recover(schedule, self._stages, error, f"{self._serial}/{self._steps}")
            raise
        finally:
            for stage in self._stages.values():
                stage.follow(Plan(), None)
