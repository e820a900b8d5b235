"""Program: what a rank runs in which order, read from torch's list of actions. Tells when to prefire, and what."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from weakref import ref

from torch.distributed.pipelining import Schedule1F1B

from regrow.pipelining import _compat
from regrow.pipelining.one_f_one_b import one_f_one_b
from regrow.pipelining.stage import PipelineStage
from regrow.pipelining.told import Sender, told


class Program:
    """The order of computation on this rank.

    Memory: one entry per action, made when it is first asked for.
    """

    __slots__ = ("_at_once", "_backwards", "_is_read", "_schedule", "_stages")

    def __init__(self, schedule: Any, stages: dict[int, PipelineStage]) -> None:
        self._schedule = ref(schedule)  # the schedule holds this
        self._stages = {index: ref(stage) for index, stage in stages.items()}
        self._is_read = False
        # In order: each backward, and whether it is a full one. Those that come right after their forward.
        self._backwards: dict[tuple[int, int], bool] = {}
        self._at_once: set[tuple[int, int]] = set()

    def before_gradient(self, key: tuple[int, int], works: Any) -> None:
        """The rank is about to wait for a gradient: replay what it is for."""
        self._read()
        self._prefire(key, ("dx", key[0] + 1, key[1]))

    def before_activation(self, key: tuple[int, int], works: Any) -> None:
        """The rank is about to wait for an activation: if it has not come, replay for the next backward."""
        if all(work.is_completed() for work in works):
            return
        self._read()
        for due in self._backwards:
            stage = self._stage(due[0])
            if stage is not None and stage.is_due(due[1]):
                self._prefire(due, ("F", key[0] - 1, key[1]))
                return

    def follows(self, stage_index: int, microbatch: int) -> bool:
        """Whether a micro-batch's backward is the next thing that this rank computes after its forward."""
        self._read()
        return (stage_index, microbatch) in self._at_once

    def _prefire(self, key: tuple[int, int], awaits: Sender) -> None:
        stage = self._stage(key[0])
        if stage is not None:
            with told("prefire", *key, awaits):
                stage.prefire(key[1], full=self._backwards.get(key, True))

    def _stage(self, index: int) -> PipelineStage | None:
        place = self._stages.get(index)
        return None if place is None else place()

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        order = [(kind, (stage, index)) for kind, stage, index in _computations(_actions(self._schedule()))]
        self._backwards = {key: kind == _compat.FULL_BACKWARD for kind, key in order if kind in _BACKWARD}
        self._at_once = {
            key
            for (kind, key), (next_kind, next_key) in pairwise(order)
            if kind == _compat.FORWARD and next_kind in _BACKWARD and next_key == key
        }


_BACKWARD = (_compat.FULL_BACKWARD, _compat.BACKWARD_INPUT)


def _actions(schedule: Any) -> list[Any]:
    if isinstance(schedule, Schedule1F1B):  # torch's own list for it is not what it runs: one forward too early
        (stage,) = _compat.stages_of(schedule)
        return one_f_one_b(stage.group_rank, stage.group_size, _compat.n_microbatches_of(schedule))
    return _compat.actions_of(schedule)


def _computations(actions: list[Any]) -> Iterator[tuple[Any, int, int]]:
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _computations(list(action.sub_actions))
        elif action.computation_type in _compat.COMPUTE:
            yield action.computation_type, action.stage_index, action.microbatch_index
