"""Trainee: a variant in training on this rank, with its own stages and optimizer. Must never know of other variants."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from regrow.cli import gpt, memory, stopwatch
from regrow.cli.corpus import Batch
from regrow.cli.gpt import StageModule
from regrow.cli.memory import Footprint
from regrow.cli.rank import Rank
from regrow.cli.schedules import make_schedule
from regrow.cli.settings import Settings
from regrow.cli.stopwatch import Stopwatch
from regrow.cli.variants import Variant
from regrow.pipelining import attach


@dataclass(slots=True)
class Seen:
    """What was seen of a variant's steps on one rank.

    Attributes:
        losses: of each step, where the last stage is; elsewhere none.
        replays: of each block, by stage.
        step_s: forward, backward and update.
        idle: the part of each step's pipeline in which the rank computed nothing; none where the host cannot tell.
    """

    losses: list[Tensor] = field(default_factory=list)
    replays: dict[int, list[float]] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    footprint: Footprint | None = None


class Trainee:
    """A variant in training.

    Memory: a model's stages of this rank and their optimizer's state, as long as it lives.
    """

    def __init__(self, variant: Variant, settings: Settings, rank: Rank) -> None:
        self.variant = variant
        self.seen = Seen()
        self._settings = settings
        self._rank = rank
        self._watch = Stopwatch()
        self._piped_s = 0.0  # of the last step
        self._held = settings.kind().held_by(rank.index, settings.n_ranks, settings.n_stages)
        self.modules = {index: self._module(index) for index in self._held}
        self.optimizer = torch.optim.AdamW(
            [p for module in self.modules.values() for p in module.parameters()], lr=settings.learning_rate
        )
        n_stages = settings.n_stages_in_all()
        self._stages = [variant.stage(module, index, n_stages, rank.device) for index, module in self.modules.items()]
        self._schedule = self._make_schedule()

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is on this rank."""
        return self._settings.n_stages_in_all() - 1 in self._held

    def named_gradients(self) -> dict[str, Tensor | None]:
        """The gradients of this rank's stages."""
        return {
            f"stage {index}: {name}": parameter.grad
            for index, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }

    def warm_up(self, batch: Batch) -> None:
        """Take a step without an update, and forget it: the first one also infers shapes, and allocates gradients."""
        self._run(batch, self._settings.seed)
        for module in self.modules.values():
            module.forget_runs()

    def rehearse(self, batch: Batch) -> None:
        """Take a step without an update."""
        self._run(batch, self._settings.seed)

    def step(self, batch: Batch, seed: int) -> Tensor | None:
        """Take a step.

        Args:
            batch: the whole one, on every rank.
            seed: of dropout.

        Returns:
            The mean loss of the micro-batches, where the last stage is.
        """
        self._rank.align()
        start = perf_counter()
        loss = self._run(batch, seed)
        self.optimizer.step()
        if self._rank.device.type == "cpu":
            self.seen.idle.append(1 - self._watch.busy_s / self._piped_s)
        else:
            torch.accelerator.synchronize(self._rank.device)  # the host is ahead, so its idle time tells nothing
        self.seen.step_s.append(perf_counter() - start)
        if loss is not None:
            self.seen.losses.append(loss)
        return loss

    def weigh(self, batch: Batch, seed: int) -> None:
        """Take a step under the profiler, without an update, for its bytes. Overwrites the gradients."""
        self.seen.replays = {index: module.replays() for index, module in self.modules.items()}
        self._rank.align()

        def step() -> None:
            self._run(batch, seed)

        marks = memory.Marks(step=stopwatch.STEP, backward=stopwatch.BACKWARD)
        self.seen.footprint = memory.measure(step, self._rank.device, marks)

    def _run(self, batch: Batch, seed: int) -> Tensor | None:
        torch.manual_seed(seed)
        self.optimizer.zero_grad(set_to_none=False)  # they stay where they are: activations alone count
        losses: list[Tensor] | None = [] if self.has_loss else None
        inputs = (batch.tokens,) if 0 in self._held else ()
        targets = batch.targets if self.has_loss else None
        self._watch.busy_s, start = 0.0, perf_counter()
        with record_function(stopwatch.STEP):
            self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        self._piped_s = perf_counter() - start
        return torch.stack(losses).mean().detach().cpu() if losses else None

    def _module(self, index: int) -> StageModule:
        settings = self._settings
        place = gpt.blocks_of(index, settings.n_stages_in_all(), settings.shape.n_blocks)
        module = StageModule(settings.shape, place, self.variant.run_block, seed=settings.seed)
        return module.to(self._rank.device)

    def _make_schedule(self) -> Any:
        loss = self._watch.timed(gpt.loss)
        schedule = make_schedule(self._settings.schedule, self._stages, self._settings.micro_batches, loss)
        if self.variant.attached is not None:
            attach(schedule, **self.variant.attached)
        for stage in self._stages:
            self._watch.watch(stage)
        return schedule
