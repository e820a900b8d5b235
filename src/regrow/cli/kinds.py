"""The schedules by name: how many stages of a rank each takes, and which. Must never import torch: options are checked.

loop, 2 ranks    rank 0: stages 0, 2    rank 1: stages 1, 3
V, 2 ranks       rank 0: stages 0, 3    rank 1: stages 1, 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regrow.cli.counts import counted


@dataclass(frozen=True, slots=True)
class Kind:
    """What a schedule asks for.

    Attributes:
        stages: of a rank, where nothing else is said.
        fixed: whether it takes just so many.
        v_shaped: whether the second half of the stages goes back through the ranks.
        rounds: whether micro-batches must fill rounds of as many as there are ranks.
        saturated: whether there must be as many micro-batches as stages.
        has_waits: whether it has places for a prefire.
    """

    stages: int = 2
    fixed: bool = False
    v_shaped: bool = False
    rounds: bool = False
    saturated: bool = False
    has_waits: bool = True

    def faults(self, name: str, n_ranks: int, n_stages: int, n_micro_batches: int) -> list[str]:
        """What does not fit, a sentence each, for numbers of 1 or more."""
        faults = []
        total = n_ranks * n_stages
        if self.fixed and n_stages != self.stages:
            faults.append(f"--stages: {name} takes {counted(self.stages, 'stage')} per rank, got {n_stages}.")
        n_rounds = max(1, n_micro_batches // n_ranks)
        if self.rounds and n_micro_batches % n_rounds:
            below = n_micro_batches - n_micro_batches % n_ranks
            faults.append(
                f"--micro-batches: {name} on {n_ranks} ranks cannot share {n_micro_batches} out evenly. "
                f"Give {below} or {below + n_ranks}."
            )
        if self.saturated and n_micro_batches < total:
            faults.append(f"--micro-batches: {n_micro_batches} is too few for {total} stages. Give {total} or more.")
        return faults

    def held_by(self, rank: int, n_ranks: int, n_stages: int) -> Sequence[int]:
        """The stages of a rank.

        Args:
            rank: which.
            n_ranks: how many there are.
            n_stages: of a rank.
        """
        if self.v_shaped:
            return (rank, 2 * n_ranks - 1 - rank)
        return range(rank, n_ranks * n_stages, n_ranks)


KINDS = {
    "gpipe": Kind(stages=1, fixed=True, has_waits=False),
    "1f1b": Kind(stages=1, fixed=True),
    "looped-bfs": Kind(),
    "interleaved-1f1b": Kind(rounds=True),
    "interleaved-zb": Kind(rounds=True),
    "zbv": Kind(fixed=True, v_shaped=True),
    "dualpipev": Kind(fixed=True, v_shaped=True, saturated=True),
}
