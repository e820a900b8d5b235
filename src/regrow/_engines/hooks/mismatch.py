"""Mismatch: the replay is not forward again. Says where they part; compares in full only after a quick look failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from regrow._core import compat
from regrow._core.faults import CheckpointError, ReplayMismatchError
from regrow._core.lines import modules_here, user_line
from regrow._engines.hooks.naming import Names
from regrow._engines.hooks.oplog import OperatorLog, at, first_difference, first_other_value, have_other_values, listing
from regrow._engines.hooks.slots import Look, describe
from regrow._engines.hooks.suspects import Scene, causes

if TYPE_CHECKING:
    from torch import nn

Difference = tuple[int, Look, Look]

_CAUSES = (
    "Does the function branch on state that changed since forward (a global, a counter, a training flag), "
    "use data-dependent shapes, or draw random numbers from a generator that is not restored?"
)


@dataclass(slots=True)
class Place:
    """Where a replay saved the first tensor that differs, or the first one too many."""

    line: str
    modules: list[nn.Module]

    @classmethod
    def here(cls) -> Place:
        """Where it is saving one now."""
        return cls(user_line(), modules_here())


@dataclass(slots=True)
class Evidence:
    """What forward leaves behind so that a mismatch can be explained; with ``debug``, or where values are compared.

    Attributes:
        log: forward's operators.
        lists: whether the report lists all of them.
    """

    function: Callable[..., Any]
    opaque: tuple[Any, ...]
    log: OperatorLog
    scene: Scene
    lists: bool

    @classmethod
    def taken(
        cls,
        function: Callable[..., Any],
        opaque: tuple[Any, ...],
        inputs: Sequence[torch.Tensor],
        *,
        lists: bool,
        sample: bool | None,
    ) -> Evidence:
        """Look at what is there before forward.

        Args:
            function: what is checkpointed.
            opaque: what lies among its arguments that is no tensor.
            inputs: its tensors.
            lists: whether a report lists all operators.
            sample: whether values are told apart by a sample; None where they are not compared.
        """
        log = OperatorLog(Names(function, opaque), sample=sample)
        return cls(function, opaque, log, Scene(function, opaque, inputs), lists)


@dataclass(slots=True)
class Case:
    """One replay that differs.

    Attributes:
        forward: how many tensors forward saved.
        replay: how many the replay saved.
        place: where the replay saved the first that differs.
        evidence: what forward left behind, and the operators of the replay.
    """

    label: str
    function: Callable[..., Any]
    opaque: tuple[Any, ...]
    inputs: Sequence[torch.Tensor]
    input_names: Sequence[str]
    forward: int
    replay: int
    differences: Sequence[Difference] = ()
    place: Place | None = None
    evidence: tuple[Evidence, OperatorLog] | None = None
    causes: list[str] = field(default_factory=list)

    def report(self) -> ReplayMismatchError:
        """The error: counts, the first differences, where the two executions part, what may be the cause."""
        index = None if self.evidence is None else first_difference(self.evidence[0].log, self.evidence[1])
        lines = [*self._what(), *self._where(index), _CAUSES]
        if self.evidence is None:
            lines.append(
                "Run once with checkpoint(..., debug=True) to list the operators of both runs and where they part."
            )
        elif self.evidence[0].lists:
            lines += [*listing("forward", self.evidence[0].log), *listing("replay", self.evidence[1])]
        operator, module, line = self._parted(index)
        return ReplayMismatchError(
            "\n".join(lines),
            label=self.label,
            forward=self.forward,
            replay=self.replay,
            indices=tuple(index for index, _, _ in self.differences),
            operator=operator,
            module=module,
            line=line,
            causes=tuple(self.causes),
        )

    def _what(self) -> list[str]:
        if self.replay != self.forward:
            n = f"{self.replay} or more" if self.replay > self.forward else str(self.replay)
            lines = [f"{self.label}: forward saved {self.forward} tensors, the replay saved {n}."]
        elif self.differences:
            n_all = f"{len(self.differences)} of {self.forward} tensors"
            lines = [f"{self.label}: {n_all} saved by the replay differ from forward's."]
        else:
            lines = [f"{self.label}: the replay is not forward again, though its saved tensors look alike."]
        for index, ours, theirs in self.differences[:3]:
            lines.append(f"Saved tensor {index}: forward {describe(ours)}, replay {describe(theirs)}.")
        if len(self.differences) > 3:
            lines.append(f"{len(self.differences) - 3} more differ.")
        return lines

    def _where(self, index: int | None) -> list[str]:
        if self.evidence is None:
            if self.place is None:
                return []
            first = "the first tensor too many" if self.replay > self.forward else "the first of them"
            module = self._module()
            return [f"The replay saved {first} at {self.place.line}{module and f', module {module}'}."]
        evidence, replay = self.evidence
        forward = evidence.log
        if index is None:
            n_ours, n_theirs = len(forward.operators), len(replay.operators)
            lines = [f"The replay ran the first {n_theirs} of forward's {n_ours} operators, in the same order."]
        else:
            pair = f"forward {at(forward, index)}; replay {at(replay, index)}"
            lines = [f"First difference, operator {index}: {pair}.", *self._inputs_of(index)]
            if have_other_values(forward, replay, index):
                lines.append("It is the same operator on tensors that look alike, and it computed other values.")
        now = Scene(self.function, self.opaque, self.inputs)
        changed, overwritten = evidence.scene.changed(now), evidence.scene.overwritten(now, self.input_names)
        self.causes = causes(changed, overwritten, (forward, replay), index)
        return [*lines, "Likely causes:", *(f"  {n}. {cause}" for n, cause in enumerate(self.causes, 1))]

    def _inputs_of(self, index: int) -> list[str]:
        """What the operators at the parting took, where both took something else."""
        assert self.evidence is not None
        logs = (self.evidence[0].log, self.evidence[1])
        takes = [log.operators[index].takes if index < len(log.operators) else "nothing" for log in logs]
        return [] if takes[0] == takes[1] else [f"It took: forward {takes[0]}; replay {takes[1]}."]

    def _parted(self, index: int | None) -> tuple[str | None, str | None, str | None]:
        """Operator, module and line at the parting; of the replay, or of forward where the replay ran nothing."""
        if self.evidence is None:
            return None, self._module() or None, None if self.place is None else self.place.line
        logs = (self.evidence[1], self.evidence[0].log)
        operator = next(
            (log.operators[index] for log in logs if index is not None and index < len(log.operators)), None
        )
        return (None, None, None) if operator is None else (operator.name, operator.module, operator.line)

    def _module(self) -> str:
        return "" if self.place is None else Names(self.function, self.opaque).of(self.place.modules)


def computed_otherwise(evidence: Evidence | None, replay: OperatorLog | None) -> bool:
    """Whether values are compared, and differ, as far as the replay ran."""
    if evidence is None or replay is None or evidence.log.sample is None:
        return False
    return first_other_value(evidence.log, replay) is not None


def is_unexplained(error: BaseException, evidence: Evidence | None, replay: OperatorLog | None) -> bool:
    """Whether the operators tell more than an error does that a replay raised: that of selective checkpointing."""
    if type(error) is not CheckpointError or evidence is None or replay is None:
        return False
    return first_difference(evidence.log, replay) is not None


def same_but_for_ragged(forward: Look, replay: Look) -> bool:
    """Whether two saved tensors look alike."""
    return forward[1:] == replay[1:] and compat.same_shape(forward[0], replay[0])
