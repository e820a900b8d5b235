"""The same steps for every variant, in turn, and where they disagree. Must never print.

The variants take turns within each step, on all ranks in the same order, so what slows the machine down slows all of
them: ratios are taken within a step, and their median is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regrow import trace
from regrow.cli.corpus import Batch, Corpus, load
from regrow.cli.rank import Rank
from regrow.cli.settings import Settings
from regrow.cli.trainee import Trainee


def warm_up(trainees: Sequence[Trainee], settings: Settings, corpus: Corpus, rank: Rank) -> None:
    """Take a step of each that is not counted."""
    for trainee in trainees:
        trainee.warm_up(_draw(settings, corpus, rank, 0))


def train(trainees: Sequence[Trainee], settings: Settings, corpus: Corpus, rank: Rank) -> Iterator[float]:
    """Take the steps, each for every trainee, and yield the first one's loss when a step is done.

    Each step starts with another trainee: none is always the one that finds the caches cold.
    """
    for step in range(settings.steps):
        batch = _draw(settings, corpus, rank, step)
        losses: list[Tensor | None] = [None] * len(trainees)
        for turn in range(len(trainees)):
            index = (step + turn) % len(trainees)
            losses[index] = trainees[index].step(batch, settings.seed + step)
        first = losses[0]
        yield rank.tell(None if first is None else first.item())


def weigh(trainees: Sequence[Trainee], settings: Settings, corpus: Corpus, rank: Rank) -> None:
    """Weigh a step of each."""
    batch = _draw(settings, corpus, rank, settings.steps)
    for trainee in trainees:
        trainee.weigh(batch, settings.seed + settings.steps)


def record(trainee: Trainee, settings: Settings, rank: Rank) -> dict[str, Any]:
    """Record what one more step does on this rank, after one that is not recorded: the profiler has gone before it."""
    text = load(settings.corpus, length=settings.shape.length)
    batch = _draw(settings, text, rank, settings.steps + 1)
    trainee.warm_up(batch)
    rank.align()
    with trace.record(rank=rank.index) as recorder:
        trainee.rehearse(batch)
    return recorder.recording()


def disagreements(trainees: Sequence[Trainee]) -> list[str]:
    """Where trainees differ on this rank from the first one in a bit of a loss, or of the last step's gradients."""
    first, *others = trainees
    return [fault for other in others for fault in (*_losses(first, other), *_gradients(first, other))]


def _draw(settings: Settings, corpus: Corpus, rank: Rank, step: int) -> Batch:
    n_pieces = settings.micro_batches * settings.pieces
    return corpus.draw(n_pieces, settings.shape.length, seed=settings.seed + step, device=rank.device)


def _losses(first: Trainee, other: Trainee) -> list[str]:
    mine, theirs = first.seen.losses, other.seen.losses
    differ = [step for step, pair in enumerate(zip(mine, theirs, strict=True)) if not _same_bits(*pair)]
    if not differ:
        return []
    step = differ[0]
    return [
        f"{other.variant.name} differs from {first.variant.name} in {len(differ)} of {len(mine)} losses, "
        f"first in step {step + 1}: {theirs[step].item():.9g}, not {mine[step].item():.9g}."
    ]


def _gradients(first: Trainee, other: Trainee) -> list[str]:
    mine, theirs = first.named_gradients(), other.named_gradients()
    differ = [name for name, gradient in mine.items() if not _same_bits(gradient, theirs[name])]
    if not differ:
        return []
    return [
        f"{other.variant.name} differs from {first.variant.name} in the gradients of {len(differ)} of {len(mine)} "
        f"parameters in step {len(first.seen.step_s)}, first {differ[0]}."
    ]


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal in every bit: NaN is equal to itself here, and 0 differs from -0."""
    if a is None or b is None:
        return False
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
