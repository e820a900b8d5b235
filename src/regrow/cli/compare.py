"""The same steps for every variant, in turn, and where they disagree. Must never print.

The variants take turns within each step, so what slows the machine down slows all of them: ratios are taken within a
step, and their median is what counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regrow.call import checkpoint
from regrow.cli import memory, training
from regrow.cli.corpus import Corpus, MicroBatch
from regrow.cli.gpt import GPT, Block, BlockRunner, Shape
from regrow.cli.memory import Footprint

FEWEST_TIMED_STEPS = 5  # whose median says something


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to call a block, and its name."""

    name: str
    run_block: BlockRunner


def _plain(block: Block, x: Tensor) -> Tensor:
    out: Tensor = block(x)
    return out


def _torch(block: Block, x: Tensor) -> Tensor:
    out: Tensor = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return out


def _regrow(block: Block, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x)
    return out


VARIANTS = (Variant("no checkpoint", _plain), Variant("torch", _torch), Variant("regrow", _regrow))


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained, on what, and for how long."""

    steps: int
    micro_batches: int
    seed: int
    device: torch.device
    shape: Shape = field(default_factory=Shape)
    pieces: int = 2  # of text, in a micro-batch
    learning_rate: float = 1e-3


@dataclass(slots=True)
class Trainee:
    """A variant in training: its own copy of model and optimizer, and what was seen of it."""

    variant: Variant
    model: GPT
    optimizer: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    footprint: Footprint | None = None


def enroll(settings: Settings, variants: Sequence[Variant]) -> list[Trainee]:
    """A trainee for each variant; all start from the same parameters."""
    torch.manual_seed(settings.seed)
    model = GPT(settings.shape).to(settings.device)
    trainees = []
    for variant in variants:
        mine = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=settings.learning_rate)
        trainees.append(Trainee(variant, mine, optimizer))
    return trainees


@contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """A context in which figures repeat, whatever else the machine does; all steps are taken in it.

    On the CPU it is one thread: where other programs want a core, two threads wait for each other, many times a step.
    On accelerators it is attention by plain operators: the fused kernels may add up in another order each time.
    """
    if device.type != "cpu":
        with sdpa_kernel(SDPBackend.MATH):
            yield
        return
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def train(trainees: list[Trainee], settings: Settings, corpus: Corpus) -> Iterator[float]:
    """Take the steps, each for every trainee, and yield the first one's loss when a step is done.

    Each step starts with another trainee: none is always the one that finds the caches cold.
    """
    for step in range(settings.steps):
        batches = _draw(settings, corpus, step)
        for turn in range(len(trainees)):
            _advance(trainees[(step + turn) % len(trainees)], batches, settings, step)
        yield trainees[0].losses[-1].item()


def warm_up(trainees: list[Trainee], settings: Settings, corpus: Corpus) -> None:
    """Take a step with a copy of each trainee, and throw it away: what only a process's first step costs is not timed.

    Memory: a second model and optimizer, one at a time, until this returns.
    """
    batches = _draw(settings, corpus, 0)[:1]
    for trainee in trainees:
        _advance(copy.deepcopy(trainee), batches, settings, 0)


def weigh(trainees: list[Trainee], settings: Settings, corpus: Corpus) -> None:
    """Run one more step for each trainee under the profiler, without an update, for its bytes."""
    batches = _draw(settings, corpus, settings.steps)
    for trainee in trainees:
        trainee.optimizer.zero_grad(set_to_none=False)  # gradients stay where they are: activations alone count
        torch.manual_seed(settings.seed + settings.steps)
        step = partial(training.run_step, trainee.model, batches, trainee.variant.run_block)
        trainee.footprint = memory.measure(step, settings.device, forward=training.FORWARD, backward=training.BACKWARD)


def disagreements(trainees: list[Trainee]) -> list[str]:
    """Where trainees differ from the first one in a bit of a loss, or of a gradient of the last step."""
    first, *others = trainees
    return [fault for other in others for fault in (*_losses(first, other), *_gradients(first, other))]


def time_ratio(trainee: Trainee, reference: Trainee) -> float | None:
    """The step time as a multiple of another's: the median over the steps, None where they are too few."""
    if len(trainee.step_s) < FEWEST_TIMED_STEPS:
        return None
    return median(mine / other for mine, other in zip(trainee.step_s, reference.step_s, strict=True))


def _advance(trainee: Trainee, batches: list[MicroBatch], settings: Settings, step: int) -> None:
    torch.manual_seed(settings.seed + step)  # dropout draws alike for every trainee
    synchronize = _synchronizer(settings.device)
    synchronize()
    start = perf_counter()
    trainee.optimizer.zero_grad(set_to_none=False)
    loss = training.run_step(trainee.model, batches, trainee.variant.run_block)
    trainee.optimizer.step()
    synchronize()
    trainee.step_s.append(perf_counter() - start)
    trainee.losses.append(loss.cpu())


def _draw(settings: Settings, corpus: Corpus, step: int) -> list[MicroBatch]:
    pieces = (settings.micro_batches, settings.pieces, settings.shape.length)
    return corpus.draw(pieces, seed=settings.seed + step, device=settings.device)


def _synchronizer(device: torch.device) -> Callable[[], None]:
    return (lambda: None) if device.type == "cpu" else partial(torch.accelerator.synchronize, device)


def _losses(first: Trainee, other: Trainee) -> list[str]:
    pairs = zip(first.losses, other.losses, strict=True)
    differ = [step for step, (mine, theirs) in enumerate(pairs, 1) if not _same_bits(mine, theirs)]
    if not differ:
        return []
    step = differ[0]
    return [
        f"{other.variant.name} differs from {first.variant.name} in {len(differ)} of {len(first.losses)} losses, "
        f"first in step {step}: {other.losses[step - 1].item():.9g}, not {first.losses[step - 1].item():.9g}."
    ]


def _gradients(first: Trainee, other: Trainee) -> list[str]:
    theirs = dict(other.model.named_parameters())
    differ = [name for name, p in first.model.named_parameters() if not _same_bits(p.grad, theirs[name].grad)]
    if not differ:
        return []
    return [
        f"{other.variant.name} differs from {first.variant.name} in the gradients of {len(differ)} of {len(theirs)} "
        f"parameters in step {len(first.losses)}, first {differ[0]}."
    ]


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal in every bit: NaN is equal to itself here, and 0 differs from -0."""
    if a is None or b is None:
        return False
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
