"""What runs on two ranks, in one launch: each program returns what its test asserts. Started by `torchrun`.

torchrun --standalone --nproc-per-node 2 -m tests.pipelining.two_ranks FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import regrow
from regrow.pipelining import PipelineStage, attach, schedule_1f1b
from tests.pipelining.conftest import BATCH, MICROBATCHES, SEED, WIDTH, Block, blocks, loss_fn

RANKS = 2
# What makes a schedule, and which stages a rank has.
LOOP: Callable[[int], tuple[int, ...]] = lambda rank: (rank, rank + RANKS)  # noqa: E731
VEE: Callable[[int], tuple[int, ...]] = lambda rank: (rank, 2 * RANKS - 1 - rank)  # noqa: E731
ONE: Callable[[int], tuple[int, ...]] = lambda rank: (rank,)  # noqa: E731
SCHEDULES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[int, ...]]]] = {
    "1F1B on the runtime": (lambda stages, n, loss_fn: schedule_1f1b(stages[0], n, loss_fn), ONE),
    "LoopedBFS": (lambda stages, n, loss_fn: ScheduleLoopedBFS(stages, n, loss_fn=loss_fn), LOOP),
    "Interleaved1F1B": (lambda stages, n, loss_fn: ScheduleInterleaved1F1B(stages, n, loss_fn=loss_fn), LOOP),
    "InterleavedZeroBubble": (
        lambda stages, n, loss_fn: ScheduleInterleavedZeroBubble(stages, n, loss_fn=loss_fn),
        LOOP,
    ),
    "ZBV": (lambda stages, n, loss_fn: ScheduleZBVZeroBubble(stages, n, loss_fn=loss_fn), VEE),
    "DualPipeV": (lambda stages, n, loss_fn: ScheduleDualPipeV(stages, n, loss_fn=loss_fn), VEE),
}


class Pipeline:
    """This rank's part of a model, and the schedule that trains it; the same weights each time."""

    def __init__(self, name: str, stage_class: type, make: Callable[[], nn.Module] = blocks, **options: Any) -> None:
        schedule_class, placing = SCHEDULES[name]
        rank = dist.get_rank()
        n_stages = RANKS * len(placing(0))
        torch.manual_seed(SEED)
        every = [make() for _ in range(n_stages)]
        self.modules = [every[index] for index in placing(rank)]
        self.stages = [stage_class(every[index], index, n_stages, torch.device("cpu")) for index in placing(rank)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.schedule = schedule_class(self.stages, MICROBATCHES, loss_fn)
        if options:
            for module in self.modules:
                regrow.apply_checkpointing(module, Block)
            attach(self.schedule, **options)
        self.first = any(stage.is_first for stage in self.stages)
        self.last = any(stage.is_last for stage in self.stages)

    def step(self, seed: int = 0) -> list[torch.Tensor | None]:
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
        torch.manual_seed(SEED + seed)
        for module in self.modules:
            module.zero_grad()
        arguments = (x,) if self.first else ()
        keywords = {"target": y, "losses": []} if self.last else {}
        self.schedule.step(*arguments, **keywords)
        return [None if p.grad is None else p.grad.clone() for module in self.modules for p in module.parameters()]

    @property
    def blocks(self) -> list[Block]:
        return [block for module in self.modules for block in module.modules() if isinstance(block, Block)]


def equal(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> bool:
    return all(g is not None and w is not None and torch.equal(g, w) for g, w in zip(got, want, strict=True))


def replays_and_gradients(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Replays per block in a step, and whether gradients are torch's own stage's without checkpoints."""
    pipeline, oracle = Pipeline(name, PipelineStage, **options), Pipeline(name, TorchStage)
    same, replays = [], set()
    for step in range(3):
        before = [block.runs for block in pipeline.blocks], [block.runs for block in oracle.blocks]
        same.append(equal(pipeline.step(step), oracle.step(step)))
        for mine, was, theirs, theirs_was in zip(pipeline.blocks, before[0], oracle.blocks, before[1], strict=True):
            replays.add(mine.runs - was - (theirs.runs - theirs_was))
    return {"same": same, "replays": sorted(replays)}


def placed_before_the_wait(name: str) -> dict[str, Any]:
    """How many replays ran outside of backward, and how many inside, in the second step."""
    pipeline = Pipeline(name, PipelineStage, prefire="on_wait", keep="never", prefire_bytes=float("inf"))
    pipeline.step()
    seen = {"outside": 0, "inside": 0}

    def note() -> None:
        if regrow.is_recomputing():
            seen["outside" if torch._C._current_graph_task_id() == -1 else "inside"] += 1

    for block in pipeline.blocks:
        block.before = note
    pipeline.step(1)
    return seen


class PlannedError(Exception):
    """Raised on purpose."""


def next_step_after_all_raised(name: str, when: tuple[int, int]) -> dict[str, Any]:
    """Every rank raises in its own ``when``-th run of a block, neither waits for the other; then steps are right."""
    pipeline, oracle = Pipeline(name, PipelineStage, prefire="on_any_wait", keep="never"), Pipeline(name, TorchStage)
    same = [equal(pipeline.step(0), oracle.step(0))]
    left = [when[dist.get_rank()]]

    def burn() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise PlannedError

    for block in pipeline.blocks:
        block.before = burn
    notes: list[str] = []
    try:
        pipeline.step(1)
        notes.append("did not raise")
    except Exception as error:
        notes += getattr(error, "__notes__", [])
    for block in pipeline.blocks:
        block.before = lambda: None
    same += [equal(pipeline.step(step), oracle.step(step)) for step in (2, 3)]
    return {"same": same, "notes": notes}


def data_parallel(name: str) -> dict[str, Any]:
    """Two replicas with all stages local, half of the batch each: gradients of one process on the whole batch."""
    from tests.pipelining.conftest import SCHEDULES as ALONE

    make_schedule, n_stages = ALONE[name]
    groups = [dist.new_group([rank]) for rank in range(RANKS)]
    torch.manual_seed(SEED)
    modules = [blocks() for _ in range(n_stages)]
    oracle = nn.Sequential(*[nn.Sequential(*module) for module in modules])
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    loss_fn(oracle(x), y).backward()
    want = [p.grad for p in oracle.parameters()]
    oracle.zero_grad()
    for module in modules:
        regrow.apply_checkpointing(module, Block)
    wrapped = [DistributedDataParallel(module) for module in modules]
    stages = [
        PipelineStage(module, index, n_stages, torch.device("cpu"), group=groups[dist.get_rank()])
        for index, module in enumerate(wrapped)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = attach(make_schedule(stages, MICROBATCHES, loss_fn=loss_fn))
    half = slice(dist.get_rank() * BATCH // 2, (dist.get_rank() + 1) * BATCH // 2)
    schedule.step(x[half], target=y[half])
    for module in modules:
        module.zero_grad()
    schedule.step(x[half], target=y[half])
    got = [p.grad for module in modules for p in module.parameters()]
    return {"close": all(torch.allclose(g, w, atol=1e-6) for g, w in zip(got, want, strict=True))}


def a_peer_that_lives(name: str) -> dict[str, Any]:
    """Rank 1 raises, rank 0 waits for it until the group gives up. The last program: the group is broken after it."""
    pipeline = Pipeline(name, PipelineStage, prefire="on_wait")
    pipeline.step()
    if dist.get_rank() == 1:

        def fail() -> None:
            raise PlannedError

        pipeline.blocks[0].before = fail
    try:
        pipeline.step(1)
    except Exception as error:
        return {"notes": getattr(error, "__notes__", [])}
    return {"notes": ["did not raise"]}


OPTIONS: dict[str, dict[str, Any]] = {
    "lazy": {"prefire": "off", "keep": "never"},
    "on wait": {"prefire": "on_wait", "keep": "never"},
    "on any wait": {"prefire": "on_any_wait", "keep": "never", "prefire_bytes": float("inf")},
}
PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"{name}, {option}": lambda name=name, option=option: replays_and_gradients(name, OPTIONS[option])
        for name in SCHEDULES
        for option in OPTIONS
    },
    **{f"{name}, placed": lambda name=name: placed_before_the_wait(name) for name in SCHEDULES},
    **{
        f"{name}, data parallel": lambda name=name: data_parallel(name)
        for name in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV")
    },
    **{
        f"{name}, all raise in runs {when}": lambda name=name, when=when: next_step_after_all_raised(name, when)
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV")
        for when in ((3, 1), (4, 1), (3, 2))
    },
    "a peer that lives": lambda: a_peer_that_lives("ZBV"),
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    results = {}
    for name, program in PROGRAMS.items():
        try:
            results[name] = program()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
        Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    os._exit(0)  # the group is broken by the last program


if __name__ == "__main__":
    main(Path(sys.argv[1]))
