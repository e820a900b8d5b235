"""Split backward by hand: gradients of activations now (dx), gradients of parameters later (dw), one replay for both.

Prints how often a block is replayed, with torch's checkpoint and with regrow's.
"""

from functools import partial

import torch
import torch.utils.checkpoint
from torch import nn

import regrow


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.layers(x)


def start(checkpoint):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(8, 32, requires_grad=True)
    return block, x, checkpoint(block, x).square().mean()


def split(block, x, loss):
    """One pass for dx, then one for each layer's parameters, as zero-bubble schedules do it."""
    dx = torch.autograd.grad(loss, x, retain_graph=True)
    yield dx
    for layer in block.layers[::2]:
        yield torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)


if __name__ == "__main__":
    want = list(split(*start(lambda block, x: block(x))))

    block, x, loss = start(partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
    list(split(block, x, loss))
    print(f"torch:  {block.runs - 1} replays for dx and 3 groups of parameters")

    with regrow.recompute_handle_collector_ctx() as handles:
        block, x, loss = start(regrow.checkpoint)
    step = ("micro_batch", 0)
    try:
        regrow.recompute_handle(handles[0], step)  # prefire: the replay runs here, before backward asks
        early = block.runs - 1
        passes = split(block, x, loss)
        with regrow.recompute_session_ctx(step, retain_on_unpack=True):
            got = list(passes)  # each pass reads, and keeps for the next one; retain_on_unpack=False is for the last
    finally:
        regrow.clear_recompute_session(step)  # nothing is left
    print(f"regrow: {block.runs - 1} replay, of which {early} was fired before backward")
    same = all(
        torch.equal(a, b) for mine, yours in zip(got, want, strict=True) for a, b in zip(mine, yours, strict=True)
    )
    print(f"gradients equal plain autograd's, bit for bit: {same}")
    assert same and (block.runs, early) == (2, 1)
