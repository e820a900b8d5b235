"""What `regrow demo` and `regrow train` are asked for, and what can be found wrong at once. Must never import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from regrow.cli.counts import counted
from regrow.cli.kinds import KINDS, Kind

RANKS = 2  # where nobody says how many

# The words of regrow.pipelining.attach, which would import torch.
PREFIRE = ("off", "on_wait", "on_any_wait")
RETENTION = ("all", "needed", "none")
KEEP = ("auto", "never")

_SEEDS = range(2**32)


@dataclass(frozen=True, slots=True)
class Options:
    """The options as given; None is what the command finds by itself."""

    steps: int
    blocks: int | None
    micro_batches: int
    ranks: int | None
    corpus: Path | None
    device: str | None
    seed: int
    schedule: str = "zbv"
    stages: int | None = None
    prefire: str | None = None
    retention: str = "needed"
    keep: str = "auto"
    trace: Path | None = None

    def kind(self) -> Kind:
        """What the schedule asks for; of an unknown one, what most ask for."""
        return KINDS.get(self.schedule, Kind())

    def n_stages(self) -> int:
        """Stages of a rank."""
        return self.kind().stages if self.stages is None else self.stages

    def faults(self, started: int | None = None) -> list[str]:
        """What is wrong, a sentence each.

        Args:
            started: how many ranks a launcher has started already, if one has.
        """
        counts = ("steps", self.steps), ("blocks", self.blocks), ("micro-batches", self.micro_batches)
        places = ("ranks", self.ranks), ("stages", self.stages)
        few = [
            f"--{name}: {n} is too few. Give 1 or more." for name, n in (*counts, *places) if n is not None and n < 1
        ]
        words = [
            *_unknown("schedule", self.schedule, KINDS),
            *_unknown("prefire", self.prefire, PREFIRE),
            *_unknown("retention", self.retention, RETENTION),
            *_unknown("keep", self.keep, KEEP),
        ]
        faults = few + words
        if self.seed not in _SEEDS:
            faults.append(f"--seed: {self.seed} is out of range. Give 0 to {_SEEDS[-1]}.")
        if self.trace is not None and (self.trace.is_dir() or not self.trace.absolute().parent.is_dir()):
            faults.append(f"--trace: {self.trace} is no place for a file. Name a file in a folder that exists.")
        if started is not None and self.ranks not in (None, started):
            faults.append(f"--ranks: {self.ranks}, but {counted(started, 'rank')} were started. Leave it out.")
        return faults if few or words else faults + self._misfits(started or self.ranks or RANKS)

    def _misfits(self, n_ranks: int) -> list[str]:
        """What is right by itself, and wrong together."""
        kind, n_stages = self.kind(), self.n_stages()
        faults = kind.faults(self.schedule, n_ranks, n_stages, self.micro_batches)
        total = n_ranks * n_stages
        if self.blocks is not None and self.blocks < total:
            faults.append(
                f"--blocks: {self.blocks} is too few for {counted(total, 'stage')}, {n_stages} on each of "
                f"{counted(n_ranks, 'rank')}. Give {total} or more."
            )
        if not kind.has_waits and self.prefire not in (None, "off"):
            faults.append(f"--prefire: {self.schedule} has no place for it. Give off, or leave it out.")
        return faults


def _unknown(name: str, given: str | None, known: Iterable[str]) -> list[str]:
    if given is None or given in known:
        return []
    return [f"--{name}: {given} is not one of {', '.join(known)}."]
