"""The arithmetic: from samples to spreads, added costs and paired ratios. Must never measure, nor print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import quantiles

PLAIN = "plain"  # the variant that others add to
REFERENCE = "torch"  # the variant that others are a ratio of
SECOND = "torch reentrant"  # what the reentrant engine is a ratio of as well


class RatioOf(Enum):
    """What is divided by the same of a reference."""

    ADDED = "added"  # time minus the time of the plain call
    TOTAL = "total"  # time
    REENTRANT = "reentrant"  # time minus the time of the plain call, over that of torch's reentrant checkpoint


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the values of all rounds lie."""

    n: int
    minimum: float
    lower: float  # quartile
    median: float
    upper: float  # quartile

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one value or more."""
        if len(values) == 1:
            return cls(1, *[values[0]] * 4)
        return cls(len(values), min(values), *quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True, slots=True)
class Figures:
    """What a variant costs in one case and phase."""

    time_ns: Spread
    added_ns: Spread
    ratios: Mapping[RatioOf, Spread | None]  # None: no round could be compared


def compare(samples: Mapping[str, Sequence[float]]) -> dict[str, Figures]:
    """Figures of every variant of one case and phase.

    Args:
        samples: one sample a round for each variant, in nanoseconds; a plain one and a reference are among them.
    """
    plain, reference, second = samples[PLAIN], samples[REFERENCE], samples.get(SECOND)
    return {
        name: Figures(
            time_ns=Spread.of(times),
            added_ns=Spread.of(added(times, plain)),
            ratios={
                RatioOf.ADDED: _spread(paired_ratios(added(times, plain), added(reference, plain))),
                RatioOf.TOTAL: _spread(paired_ratios(times, reference)),
                **({} if second is None else {RatioOf.REENTRANT: _to_second(times, plain, second)}),
            },
        )
        for name, times in samples.items()
    }


def added(times: Sequence[float], plain: Sequence[float]) -> list[float]:
    """What each round cost over the plain call of the same round."""
    return [time - base for time, base in zip(times, plain, strict=True)]


def paired_ratios(costs: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Each round's cost over the reference's cost in the same round.

    A round in which the reference cost nothing or less was disturbed and has no ratio. It is left out for all variants
    alike; the count of a spread says how many stayed.
    """
    return [cost / base for cost, base in zip(costs, reference, strict=True) if base > 0]


def _to_second(times: Sequence[float], plain: Sequence[float], second: Sequence[float]) -> Spread | None:
    return _spread(paired_ratios(added(times, plain), added(second, plain)))


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread.of(values) if values else None
