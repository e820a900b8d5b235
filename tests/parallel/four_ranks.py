"""A pipeline of two ranks, each of which is sharded over two: FSDP2 inside pipeline stages.

torchrun --standalone --nproc-per-node 4 -m tests.parallel.four_ranks FOLDER
"""

from __future__ import annotations

import json
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

import regrow
from regrow.pipelining import PipelineStage, attach
from tests.parallel.two_ranks import ENGINES
from tests.pipelining.conftest import MICROBATCHES, WIDTH, Block, loss_fn

N_STAGES = 4
ROWS = 8  # of each rank of a group of replicas
# What makes a schedule, and which stages a rank of the pipeline has.
SCHEDULES: dict[str, tuple[Any, Any]] = {
    "ZBV": (ScheduleZBVZeroBubble, lambda rank: (rank, 3 - rank)),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, lambda rank: (rank, rank + 2)),
}
PREFIRE = ("off", "on_any_wait")


def stage_modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(), Block()) for _ in range(N_STAGES)]


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2 * ROWS, WIDTH, generator=generator), torch.randn(2 * ROWS, WIDTH, generator=generator)


def sharded_stages(name: str, prefire: str, *, use_reentrant: bool) -> dict[str, Any]:
    """Gradients of the whole batch in one process, and replays per micro-batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    make, placing = SCHEDULES[name]
    modules, oracle = stage_modules(), nn.Sequential(*stage_modules())
    mine = placing(mesh["pp"].get_local_rank())
    for index in mine:
        regrow.apply_checkpointing(modules[index], Block, use_reentrant=use_reentrant)
        fully_shard(modules[index], mesh=mesh["dp"])
    stages = [
        PipelineStage(modules[index], index, N_STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
        for index in mine
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = attach(make(stages, MICROBATCHES, loss_fn=loss_fn), prefire=prefire, keep="never")
    blocks = [block for index in mine for block in modules[index]]
    found: dict[str, Any] = {"same": [], "runs": []}
    for step in range(2):
        for block in blocks:
            block.runs = 0
            block.zero_grad()
        x, y = data(step)
        replica = mesh["dp"].get_local_rank()
        first = (x.chunk(2)[replica],) if 0 in mine else ()
        schedule.step(*first, target=y.chunk(2)[replica] if N_STAGES - 1 in mine else None)
        oracle.zero_grad()
        loss_fn(oracle(x), y).backward()
        pairs = [(modules[index], oracle[index]) for index in mine]
        found["same"].append(
            all(
                torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6)
                for module, whole in pairs
                for p, q in zip(module.parameters(), whole.parameters(), strict=True)
            )
        )
        found["runs"].append(sorted({block.runs for block in blocks}))
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for (engine, use_reentrant), name, prefire in product(ENGINES.items(), SCHEDULES, PREFIRE):
        results[f"{engine}: {name}, {prefire}"] = sharded_stages(name, prefire, use_reentrant=use_reentrant)
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
