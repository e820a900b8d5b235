"""What one rank of real.py does: trains with every contender in turn, and notes times, runs, bytes and gradients."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from contenders import CONTENDERS, Contender
from layouts import LAYOUTS, Layout
from model import SEED, Size, blocks_of, loss_fn, stages_of

_CPU = 0  # "Device Type" of the host, in a trace


@dataclass(slots=True)
class Observed:
    """What one rank saw of one contender."""

    runs: dict[int, float]  # of a block, for each micro-batch, by stage: forward and replays
    same_gradients: bool  # those of the first contender, bit for bit
    peak_bytes: int  # over the level at the start of the step
    step_s: list[float] = field(default_factory=list)  # an index is a round, the same for all


class Pipeline:
    """One rank's part of a model, trained in one way."""

    def __init__(self, layout: Layout, contender: Contender, size: Size) -> None:
        rank, n_ranks = dist.get_rank(), dist.get_world_size()
        n_stages = layout.n_stages(n_ranks)
        model, here = stages_of(size, n_stages), layout.stages_of(rank, n_ranks)
        self.modules = {index: model[index] for index in here}
        for module in self.modules.values():
            for name, block in list(module.named_children()):
                setattr(module, name, contender.checkpoint(block))
        cpu = torch.device("cpu")
        stages = [contender.stage(module, index, n_stages, cpu) for index, module in self.modules.items()]
        self._schedule = layout.schedule(stages, size.n_microbatches, loss_fn)
        contender.prepare(self._schedule)
        x, target = size.data()
        self._args = (x,) if 0 in here else ()
        self._kwargs = {"target": target, "losses": []} if n_stages - 1 in here else {}

    def step(self) -> None:
        """One step; gradients are added to what is there."""
        self._schedule.step(*self._args, **self._kwargs)

    def clear(self) -> None:
        """Gradients to zero, in place, so that they are no allocation of a step; runs to zero."""
        for gradient in self.gradients():
            gradient.zero_()
        for module in self.modules.values():
            for block in blocks_of(module):
                block.runs = 0

    def gradients(self) -> list[Tensor]:
        """Of all parameters on this rank, in the order of the stages."""
        parameters = (p for module in self.modules.values() for p in module.parameters())
        return [p.grad for p in parameters if p.grad is not None]

    def runs(self, n_microbatches: int) -> dict[int, float]:
        """Runs of a block for each micro-batch, by stage; the mean over its blocks."""
        counts = {index: [block.runs for block in blocks_of(module)] for index, module in self.modules.items()}
        return {index: sum(runs) / len(runs) / n_microbatches for index, runs in counts.items()}


def train(rank: int, layout_name: str, names: list[str], size: Size, rounds: int) -> dict[str, Observed]:
    """Every contender on one schedule, in turn within each round.

    Args:
        rank: of this process.
        layout_name: which schedule.
        names: which contenders; gradients are compared with those of the first.
        size: of model and data.
        rounds: how often each is timed.
    """
    for quiet in ("regrow.pipelining", "torch.distributed.pipelining"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    layout = LAYOUTS[layout_name]
    pipelines = {name: Pipeline(layout, CONTENDERS[name], size) for name in names}
    seen: dict[str, Observed] = {}
    expected: list[Tensor] = []
    for name, pipeline in pipelines.items():
        pipeline.step()  # infers shapes, learns what dw reads, allocates gradients
        pipeline.clear()
        pipeline.step()
        found = [gradient.clone() for gradient in pipeline.gradients()]
        expected = expected or found
        seen[name] = Observed(pipeline.runs(size.n_microbatches), _same(found, expected), _peak_bytes(pipeline.step))
    order = list(pipelines)
    draw = random.Random(SEED)  # the same on every rank
    with _collector_at_rest():
        for _ in range(rounds):
            draw.shuffle(order)
            for name in order:
                seen[name].step_s.append(_seconds(pipelines[name].step))
    return seen


def _seconds(step: Callable[[], None]) -> float:
    gc.collect()  # nobody pays for the garbage of another
    dist.barrier()
    began = perf_counter()
    step()
    return perf_counter() - began


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def _peak_bytes(step: Callable[[], None]) -> int:
    """The most that is allocated at a time, from the profiler's record: never a counter of our own.

    Two steps, so that what the first leaves behind counts in the second. What was there before, such as parameters and
    gradients, does not count, and neither does its release: for a block that it did not see allocated, the profiler
    may report the size of another that once had its address.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library writes to stderr without being asked
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        step()
    changes = [event for event in _events(profiler) if _is_allocation(event)]
    sizes: dict[int, int] = {}
    live = peak = 0
    for change in sorted(changes, key=itemgetter("ts")):
        address, n_bytes = change["args"]["Addr"], change["args"]["Bytes"]
        if n_bytes > 0:
            sizes[address] = n_bytes
            live += n_bytes
            peak = max(peak, live)
        else:
            live -= sizes.pop(address, 0)
    return peak


def _events(profiler: profile) -> Iterable[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _is_allocation(event: dict[str, Any]) -> bool:
    return event.get("name") == "[memory]" and event["args"]["Device Type"] == _CPU
