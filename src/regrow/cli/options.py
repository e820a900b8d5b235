"""What `regrow demo` is asked for, and what can be found wrong with it at once. Must never import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_SEEDS = range(2**32)


@dataclass(frozen=True, slots=True)
class Options:
    """The options as given; None is what the demo finds by itself."""

    steps: int
    blocks: int
    micro_batches: int
    corpus: Path | None
    device: str | None
    seed: int

    def faults(self) -> list[str]:
        """What is wrong with the numbers, a sentence each."""
        counts = (("steps", self.steps), ("blocks", self.blocks), ("micro-batches", self.micro_batches))
        faults = [f"--{name}: {value} is too few. Give 1 or more." for name, value in counts if value < 1]
        if self.seed not in _SEEDS:
            faults.append(f"--seed: {self.seed} is out of range. Give 0 to {_SEEDS[-1]}.")
        return faults
