"""Drop-in: a training script as it was written for torch, with one import line changed.

Prints the losses, which are those of torch's checkpoint and of no checkpoint at all, and how often the blocks ran.
"""

import torch
from torch import nn

from regrow import checkpoint  # was: from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )
        self.runs = 0

    def forward(self, x, scale):
        self.runs += 1
        return x + scale * self.layers(x)


class Model(nn.Module):
    def __init__(self, width=32, depth=3, checkpointed=True):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, scale=0.5, use_reentrant=False) if self.checkpointed else block(x, scale=0.5)
        return x


def train(model, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 32)
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(**options):
    torch.manual_seed(0)
    model = Model(**options)
    return train(model), [block.runs for block in model.blocks]


if __name__ == "__main__":
    losses, runs = run()
    plain, _ = run(checkpointed=False)
    for step, loss in enumerate(losses):
        print(f"step {step}: loss {loss!r}")
    print(f"each block ran {runs} times in {len(losses)} steps: forward and one replay")
    print(f"losses equal those without checkpoints, bit for bit: {losses == plain}")
    assert losses == plain
