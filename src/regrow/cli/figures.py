"""Figures: what all ranks saw of a variant, as one row. Must never measure, and never print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from regrow.cli.memory import Footprint
from regrow.cli.trainee import Seen

FEWEST_TIMED_STEPS = 5  # whose median says something


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a variant; None, or nothing in a list, is what the run does not tell.

    Attributes:
        loss: of the last step.
        replays: of each block, in the order of the model.
        step_s: the median step, as long as its slowest rank took.
        time_ratio: the step time as a multiple of another variant's: the median of the ratios within each step.
        idle: of each rank, the part of a step in which it computed nothing.
        footprint: the most that a rank keeps alive.
    """

    name: str
    loss: float
    replays: list[float]
    step_s: float | None = None
    time_ratio: float | None = None
    idle: Sequence[float] = ()
    footprint: Footprint | None = None


def row(name: str, ranks: Sequence[Seen], reference: Sequence[Seen] | None = None) -> Row:
    """One row.

    Args:
        name: of the variant.
        ranks: what each rank saw of it.
        reference: what each rank saw of the variant that it is measured against.
    """
    by_stage = sorted(pair for seen in ranks for pair in seen.replays.items())
    steps = _slowest(ranks)
    timed = len(steps) >= FEWEST_TIMED_STEPS
    return Row(
        name=name,
        loss=next(seen.losses[-1].item() for seen in ranks if seen.losses),
        replays=[count for _, counts in by_stage for count in counts],
        step_s=median(steps) if timed else None,
        time_ratio=_ratio(steps, _slowest(reference)) if timed and reference is not None else None,
        idle=[median(seen.idle) for seen in ranks if seen.idle] if timed else (),
        footprint=_largest([seen.footprint for seen in ranks if seen.footprint is not None]),
    )


def _slowest(ranks: Sequence[Seen]) -> list[float]:
    """Each step's time on the rank that took longest; all began together."""
    return [max(times) for times in zip(*(seen.step_s for seen in ranks), strict=True)]


def _ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    return median(a / b for a, b in zip(mine, others, strict=True))


def _largest(footprints: Sequence[Footprint]) -> Footprint | None:
    if not footprints:
        return None
    return Footprint(max(each.peak_bytes for each in footprints), max(each.retained_bytes for each in footprints))
