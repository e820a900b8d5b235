"""Takes samples of variants in turn, in one process. Must never know what a variant does, nor compare.

    for each round:  shuffle the variants; for each:  collect garbage | clock on | repeats | clock off

What slows the machine down for a while slows all variants of a round, so a comparison is made within a round.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from time import perf_counter_ns

import torch
from torch import Tensor

SEED = 20240501


class Phase(Enum):
    """What a sample covers."""

    FORWARD = "forward"  # until the output is there
    STEP = "forward+backward"  # until the gradients are there and the graph is gone


Samples = dict[Phase, dict[str, list[float]]]  # nanoseconds of one repeat; an index is a round, the same for all


class GradientMismatchError(Exception):
    """Variants that should do the same do not; there is nothing to time.

    Attributes:
        variants: the names of those that differ from the first.
    """

    def __init__(self, variants: Sequence[str], first: str) -> None:
        self.variants = tuple(variants)
        super().__init__(
            f"{', '.join(variants)}: output or gradients are not those of {first}, bit for bit. "
            "Times of different work say nothing: mend the variant or the case first."
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do the work, and its name."""

    name: str
    forward: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """How often everything is run."""

    rounds: int
    warm_up: int
    seed: int = SEED  # of the order within rounds


def measure(variants: Sequence[Variant], gradient: Tensor, *, repeats: int, plan: Plan) -> Samples:
    """Time every variant once a round, in an order that is drawn anew for each round.

    Args:
        variants: what is timed; names are unique.
        gradient: what backward starts from.
        repeats: steps in one sample, so that a sample is long against the clock.
        plan: rounds, and rounds before them that are not kept.

    Returns:
        For each phase and variant one sample a round, in nanoseconds of one repeat.
    """
    samples: Samples = {phase: {variant.name: [] for variant in variants} for phase in Phase}
    order, draw = list(variants), random.Random(plan.seed)
    with one_thread(), collector_at_rest():
        for n_done in range(plan.warm_up + plan.rounds):
            draw.shuffle(order)
            for variant in order:
                taken = _sample(variant.forward, gradient, repeats)
                if n_done >= plan.warm_up:
                    for phase, sample_ns in taken.items():
                        samples[phase][variant.name].append(sample_ns)
    return samples


def check_same(variants: Sequence[Variant], leaves: Sequence[Tensor], gradient: Tensor) -> None:
    """Compare output and gradients of all variants with those of the first, bit for bit.

    Raises:
        GradientMismatchError: some differ.
    """
    with one_thread():
        first, *others = [_results(variant, leaves, gradient) for variant in variants]
    different = [
        variant.name
        for variant, results in zip(variants[1:], others, strict=True)
        if not all(map(torch.equal, results, first))
    ]
    if different:
        raise GradientMismatchError(different, variants[0].name)


@contextmanager
def one_thread() -> Iterator[None]:
    """Operators run on the calling thread only: what is measured is the host, not how operators share cores."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """No collection by itself, and what is alive now is set aside, so that a collection between samples is short."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _sample(forward: Callable[[], Tensor], gradient: Tensor, repeats: int) -> dict[Phase, float]:
    gc.collect()  # each variant starts without what the one before it left, and pays for nobody's garbage
    forward_ns = step_ns = 0
    for _ in range(repeats):
        began = perf_counter_ns()
        output = forward()
        between = perf_counter_ns()
        output.backward(gradient)
        del output  # taking the graph apart is part of a step
        ended = perf_counter_ns()
        forward_ns += between - began
        step_ns += ended - began
    return {Phase.FORWARD: forward_ns / repeats, Phase.STEP: step_ns / repeats}


def _results(variant: Variant, leaves: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    for leaf in leaves:
        leaf.grad = None
    output = variant.forward()
    output.backward(gradient)
    nothing = torch.empty(0)
    return [output.detach(), *(nothing if leaf.grad is None else leaf.grad for leaf in leaves)]
