"""Pipeline: torch's zero-bubble schedule ZBV on two ranks, replays fired while a rank would wait for its neighbour.

Started with python it starts two ranks, with torchrun it is one. Prints when replays ran, and whose losses they give.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage as Plain
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

import regrow
from regrow.pipelining import PipelineStage, attach

WIDTH, MICROBATCHES, STEPS = 32, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.replays = self.early = self.gradients = 0

    def forward(self, x):
        if regrow.is_recomputing():
            self.replays += 1
            self.early += self.replays > self.gradients
        out = x + self.layers(x)
        if out.requires_grad and not regrow.is_recomputing():
            first = iter([1])  # dw runs hooks once more
            out.register_hook(lambda _: setattr(self, "gradients", self.gradients + next(first, 0)))
        return out


def train(stage_class, rank, ranks):
    places = (rank, 2 * ranks - 1 - rank)  # of this rank's stages in a V
    torch.manual_seed(0)
    blocks = [Block() for _ in range(2 * ranks)]
    stages = [stage_class(blocks[place], place, 2 * ranks, torch.device("cpu")) for place in places]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    mine = [blocks[place] for place in places]
    if stage_class is PipelineStage:
        for block in mine:
            regrow.checkpoint_wrapper(block)
        attach(schedule, prefire="on_wait", keep="never", prefire_bytes=float("inf"))
    losses, optimizer = [], torch.optim.SGD([p for block in mine for p in block.parameters()], lr=0.1)
    for step in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        schedule.step(x, target=x.roll(1, dims=1), losses=losses) if rank == 0 else schedule.step()
        optimizer.step()
        for block in mine if step == 0 else []:  # torch runs each block once more, to learn shapes
            block.replays = block.early = block.gradients = 0
    return [loss.item() for loss in losses], mine


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    want, _ = train(Plain, rank, ranks)
    losses, blocks = train(PipelineStage, rank, ranks)
    counts = torch.tensor([[block.replays, block.early] for block in blocks]).sum(0)
    dist.all_reduce(counts)
    replays, early = counts.tolist()
    if rank == 0:
        print(f"{replays} replays on {ranks} ranks: one for each of {2 * ranks} blocks, micro-batch and step")
        print(f"{early} of them ran before the gradient came, while the rank would have waited")
        print(f"losses equal those of torch's stages without checkpoints: {losses == want}", flush=True)
    dist.destroy_process_group()
    assert losses == want and early > 0 and replays == 2 * ranks * MICROBATCHES * (STEPS - 1)


if __name__ == "__main__":
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    main() if "RANK" in os.environ else subprocess.run(launch, check=True, env=env)
