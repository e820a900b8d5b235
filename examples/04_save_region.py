"""SAVE region: attention inside a checkpointed block runs once and is never replayed, the rest of the block is.

Prints how often each ran, and that gradients are plain.
"""

import torch
from torch import nn

import regrow

WIDTH, HEADS = 64, 4


class Attention(nn.Module):
    """What is dear to run again: here attention, elsewhere a collective or a router."""

    runs = 0

    def forward(self, q, k, v):
        self.runs += 1
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(x)))


def step(block, call):
    x = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = call(block, x).square().mean()
    return torch.autograd.grad(loss, [x, *block.parameters()])


if __name__ == "__main__":
    torch.manual_seed(0)
    block = Block()
    want = step(block, lambda block, x: block(x))
    block.runs = block.attention.runs = 0

    regrow.checkpoint_exclude_wrapper(block.attention)
    got = step(block, regrow.checkpoint)
    same = all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    print(f"the block ran {block.runs} times: forward and one replay")
    print(f"its attention ran {block.attention.runs} time: the replay went around it")
    print(f"gradients equal plain autograd's, bit for bit: {same}")
    assert same and (block.runs, block.attention.runs) == (2, 1)
