"""Settings: what is trained, on what, and for how long; checked, and the same on every rank. Must never change."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from regrow.cli.gpt import Shape
from regrow.cli.kinds import KINDS, Kind


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained."""

    command: str  # who was asked, for whoever has to complain
    steps: int
    micro_batches: int
    seed: int
    n_ranks: int
    schedule: str = "zbv"
    n_stages: int = 2  # of a rank
    device_type: str = "cpu"
    corpus: Path | None = None
    shape: Shape = field(default_factory=Shape)
    pieces: int = 2  # of text, in a micro-batch
    learning_rate: float = 1e-3

    def kind(self) -> Kind:
        """What the schedule asks for."""
        return KINDS[self.schedule]

    def n_stages_in_all(self) -> int:
        """Of all ranks."""
        return self.n_ranks * self.n_stages
