"""The models that are measured: a chain whose border is plain to see, a transformer block. Must know no checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Region = Callable[..., Tensor]  # how a part of a block is called: Region(function, *args)


def run(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """A part that is nothing particular."""
    return function(*args)


class Chain(nn.Module):
    """RMSNorm -> matmul -> GELU, with the matmul as the part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor, region: Region = run) -> Tensor:
        """Run it; ``region`` calls the part."""
        return F.gelu(region(torch.matmul, self.norm(x), self.weight))


class Block(nn.Module):
    """A transformer block, with only ``scaled_dot_product_attention`` as the part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor, region: Region = run) -> Tensor:
        """Run it; ``region`` calls the part."""
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.transpose(1, 3).unbind(2)
        attended = region(F.scaled_dot_product_attention, q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        output: Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return output
