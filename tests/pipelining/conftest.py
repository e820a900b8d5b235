"""What the tests of pipelines share: models cut into stages, every schedule at world size 1, the plain run as oracle.

At world size 1 the schedules with several stages per rank run them all here, and cut backward into I and W as on many.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage as TorchStage,
)
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

import regrow
from regrow.pipelining import PipelineStage, attach, schedule_1f1b
from tests.conftest import Engine

SEED = 11
WIDTH = 8
BATCH = 8
MICROBATCHES = 4


@pytest.fixture(autouse=True)
def alone(one_rank: Any) -> None:
    """A process group of this process alone."""


def one_stage(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda stages, n, loss_fn, **options: make(stages[0], n, loss_fn, **options)


# By name: what makes a schedule of the stages, and how many stages it takes at world size 1.
SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {
    "GPipe": (one_stage(ScheduleGPipe), 1),
    "1F1B": (one_stage(Schedule1F1B), 1),
    "1F1B on the runtime": (one_stage(schedule_1f1b), 1),
    "LoopedBFS": (ScheduleLoopedBFS, 2),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, 2),
    "ZBV": (ScheduleZBVZeroBubble, 2),
    "DualPipeV": (ScheduleDualPipeV, 2),
}
SPLIT = ("InterleavedZeroBubble", "ZBV")


class Block(nn.Module):
    """A residual block that counts its runs."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0
        self.before: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.before()
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@dataclass
class Pipeline:
    """A model of one module per stage, and the schedule that trains it."""

    modules: list[nn.Module]
    stages: list[Any]
    schedule: Any
    losses: list[torch.Tensor] | None = field(default_factory=list)

    def step(self, seed: int = 0) -> list[torch.Tensor | None]:
        """One step from fixed data; the gradients of all parameters."""
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
        torch.manual_seed(SEED + seed)
        self.zero_grad()
        self.schedule.step(x, target=y, losses=self.losses)
        return self.grads()

    def grads(self) -> list[torch.Tensor | None]:
        return [p.grad for module in self.modules for p in module.parameters()]

    def zero_grad(self) -> None:
        for module in self.modules:
            module.zero_grad()

    @property
    def blocks(self) -> list[Block]:
        return [block for module in self.modules for block in module.modules() if isinstance(block, Block)]


def blocks(n: int = 2, **options: Any) -> nn.Module:
    return nn.Sequential(*[Block(**options) for _ in range(n)])


# Which engine `checkpointed` takes; set for each test by `on_each_engine`.
chosen = {"use_reentrant": False}


@pytest.fixture
def on_each_engine(engine: Engine) -> Iterator[None]:
    """Blocks are checkpointed by the engine under test."""
    chosen["use_reentrant"] = engine.use_reentrant
    yield
    chosen["use_reentrant"] = False


def checkpointed(module: nn.Module) -> nn.Module:
    """Every block of a stage is checkpointed."""
    regrow.apply_checkpointing(module, Block, **chosen)
    return module


def make_pipeline(
    name: str,
    make: Callable[[], nn.Module] = blocks,
    *,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    stage_class: type = PipelineStage,
    loss: Callable[..., torch.Tensor] = loss_fn,
    n_microbatches: int = MICROBATCHES,
    stage_options: dict[str, Any] | None = None,
    **options: Any,
) -> Pipeline:
    """A pipeline with the same weights each time; attached if options of `attach` are given."""
    schedule_class, n_stages = SCHEDULES[name]
    torch.manual_seed(SEED)
    modules = [make() for _ in range(n_stages)]
    if wrap is not None:
        modules = [wrap(module) for module in modules]
    stages = [
        stage_class(module, index, n_stages, torch.device("cpu"), **(stage_options or {}))
        for index, module in enumerate(modules)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = schedule_class(stages, n_microbatches, loss_fn=loss)
    if options:
        attach(schedule, **options)
    return Pipeline(modules, stages, schedule)


def plain(name: str, make: Callable[[], nn.Module] = blocks, **options: Any) -> Pipeline:
    """The oracle: torch's own stages, nothing checkpointed."""
    return make_pipeline(name, make, stage_class=TorchStage, **options)
