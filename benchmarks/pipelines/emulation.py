"""What one rank of emulated.py does: the same pipelines, with blocks that sleep and messages that take a given time.

Everything but arithmetic is real: torch's runtime, its messages over gloo, checkpoints, replays, split backwards. A
message carries the time at which it was sent, and is held back on the side that receives it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage

import regrow
from contenders import CONTENDERS, Contender
from layouts import LAYOUTS, Layout
from regrow.pipelining import PipelineStage, attach
from simulation import N_PARAMETER_GROUPS, Cost

WIDTH = 2

_whole = partial(attach, keep="never", prefire_bytes=math.inf)
EMULATED = {
    contender.name: contender
    for contender in (
        *(CONTENDERS[name] for name in ("none", "torch", "lazy")),
        Contender("on_wait", PipelineStage, regrow.checkpoint_wrapper, _whole),
        Contender("on_any_wait", PipelineStage, regrow.checkpoint_wrapper, partial(_whole, prefire="on_any_wait")),
    )
}
Times = dict[float, dict[str, list[float]]]  # seconds of a step, by latency and contender; an index is a round


@dataclass(slots=True)
class Pace:
    """How long things take on this rank; nothing takes any time until a unit is set."""

    unit_s: float = 0.0
    latency_s: float = 0.0
    began_s: float = 0.0  # the step; clocks of the ranks are one

    def work(self, units: float) -> None:
        """Be busy."""
        if self.unit_s:
            time.sleep(units * self.unit_s)


pace = Pace()


class _Dx(torch.autograd.Function):
    """Nothing, whose gradient takes the time of a block's dx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: float) -> Tensor:
        ctx.units = units
        return x.clone()  # the output of a stage must not be a view, or torch cannot cut it off

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        pace.work(ctx.units)
        return grad, None


class _Dw(torch.autograd.Function):
    """Nothing, whose gradient takes the time of a parameter's part of dw. On the way of a parameter only."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, units: float) -> Tensor:
        ctx.units = units
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        pace.work(ctx.units)
        return grad, None


class SleepingBlock(nn.Module):
    """A block that takes time instead of computing, with as many parameters in groups of their own as a real one."""

    def __init__(self, units: float) -> None:
        super().__init__()
        ones = torch.ones(WIDTH, dtype=torch.float64)
        self.weights = nn.ParameterList(ones.clone() for _ in range(N_PARAMETER_GROUPS))
        self.units = units

    def forward(self, x: Tensor) -> Any:
        """The product of all, after a while. Products save what a replay has to bring back."""
        pace.work(self.units)
        for weight in self.weights:
            x = x * _Dw.apply(weight, self.units / N_PARAMETER_GROUPS)  # type: ignore[no-untyped-call]
        return _Dx.apply(x, self.units)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Delayed:
    """A receive that is done when the message has come and has been on its way for long enough."""

    work: Any
    buffer: Tensor

    def wait(self) -> None:
        """Wait for both."""
        self.work.wait()
        time.sleep(max(0.0, self._sent_s() + pace.latency_s - time.monotonic()))

    def is_completed(self) -> bool:
        """Whether it is there; gloo itself only knows after a wait, but what was sent in this step says so itself."""
        sent_s = self._sent_s()
        return pace.began_s < sent_s <= time.monotonic() - pace.latency_s

    def _sent_s(self) -> float:
        return float(self.buffer.detach().flatten()[0])


class DelayedReceives(dict[Any, Any]):
    """Receives that were posted, made to take their time. Stands before the mapping that was there."""

    def __init__(self, posted: dict[Any, Any], buffer_of: Callable[[tuple[int, int]], Tensor]) -> None:
        super().__init__()
        self._posted = posted
        self._buffer_of = buffer_of

    def __setitem__(self, key: tuple[int, int], works: list[Any]) -> None:
        self._posted[key] = [Delayed(work, self._buffer_of(key)) for work in works]

    def __contains__(self, key: object) -> bool:
        return key in self._posted

    def pop(self, key: tuple[int, int], *default: Any) -> Any:
        """Take a receive out."""
        return self._posted.pop(key, *default)


@dataclass(slots=True)
class SleepingPipeline:
    """One rank's part of a model that sleeps."""

    layout: Layout
    contender: Contender
    cost: Cost
    n_microbatches: int
    schedule: Any = field(init=False)
    args: tuple[Tensor, ...] = field(init=False)
    kwargs: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        """Make stages and schedule."""
        rank, n_ranks = dist.get_rank(), dist.get_world_size()
        n_stages, here = self.layout.n_stages(n_ranks), self.layout.stages_of(rank, n_ranks)
        stages = {index: self._stage(index, n_stages) for index in here}
        self.schedule = self.layout.schedule(list(stages.values()), self.n_microbatches, nn.functional.mse_loss)
        self.contender.prepare(self.schedule)
        delay_receives(self.schedule, stages)
        x = torch.ones(self.n_microbatches, WIDTH, dtype=torch.float64)
        self.args = (x,) if 0 in here else ()
        self.kwargs = {"target": x, "losses": []} if n_stages - 1 in here else {}

    def step_s(self) -> float:
        """Seconds of a step on this rank."""
        pace.began_s = time.monotonic()
        dist.barrier()
        began_s = time.monotonic()
        self.schedule.step(*self.args, **self.kwargs)
        return time.monotonic() - began_s

    def _stage(self, index: int, n_stages: int) -> TorchStage:
        blocks = [SleepingBlock(self.cost.stage / self.cost.blocks) for _ in range(self.cost.blocks)]
        module = nn.Sequential(*[self.contender.checkpoint(block) for block in blocks])
        stage: Any = self.contender.stage(module, index, n_stages, torch.device("cpu"))
        stage.get_fwd_send_ops = stamped(stage.get_fwd_send_ops)
        stage.get_bwd_send_ops = stamped(stage.get_bwd_send_ops)
        return stage  # type: ignore[no-any-return]


def stamped(send_ops: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
    """What is sent says when it was."""

    def stamp(microbatch: int) -> list[Any]:
        ops = send_ops(microbatch)
        for op in ops:
            op.tensor.detach().fill_(time.monotonic())
        return ops

    return stamp


def delay_receives(schedule: Any, stages: dict[int, Any]) -> None:
    """Make every message take the time that the pace says."""
    schedule.fwd_recv_ops = DelayedReceives(
        schedule.fwd_recv_ops, lambda key: stages[key[0]].args_recv_info[key[1]][0].buffer
    )
    schedule.bwd_recv_ops = DelayedReceives(
        schedule.bwd_recv_ops, lambda key: stages[key[0]].grad_recv_info[key[1]][0].buffer
    )


def emulate(
    rank: int, layout_name: str, n_microbatches: int, cost: Cost, unit_s: float, latencies: list[float], rounds: int
) -> Times:
    """Every contender on one schedule, in turn within each round.

    Args:
        rank: of this process.
        layout_name: which schedule.
        n_microbatches: in a step.
        cost: what a stage takes; its latency is not looked at.
        unit_s: seconds of one unit.
        latencies: of messages, in units.
        rounds: how often each is timed.
    """
    for quiet in ("regrow.pipelining", "torch.distributed.pipelining"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    layout = LAYOUTS[layout_name]
    pipelines = {name: SleepingPipeline(layout, way, cost, n_microbatches) for name, way in EMULATED.items()}
    for pipeline in pipelines.values():
        pipeline.step_s()  # infers shapes, learns what dw reads; takes no time yet
    times: Times = {latency: {name: [] for name in pipelines} for latency in latencies}
    pace.unit_s = unit_s
    for _ in range(rounds):
        for latency in latencies:
            pace.latency_s = latency * unit_s
            for name, pipeline in pipelines.items():
                times[latency][name].append(pipeline.step_s())
    return times
