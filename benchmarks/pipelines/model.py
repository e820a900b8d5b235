"""The model that is trained: transformer blocks that count their runs, cut into stages of equal length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

SEED = 20240501


@dataclass(frozen=True, slots=True)
class Size:
    """How large model and data are."""

    n_blocks: int = 8
    width: int = 256
    n_heads: int = 4
    length: int = 128
    microbatch: int = 2
    n_microbatches: int = 8

    def data(self) -> tuple[Tensor, Tensor]:
        """Input and target of one step, the same on every rank."""
        generator = torch.Generator().manual_seed(SEED)
        shape = (self.microbatch * self.n_microbatches, self.length, self.width)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


class Block(nn.Module):
    """A transformer block that normalises first. Twelve parameters, in six pairs that are used at one place each."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then two layers, each added to what came in."""
        self.runs += 1
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.n_heads, width // self.n_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        widened: Tensor = self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return x + widened


def stages_of(size: Size, n_stages: int) -> list[nn.Sequential]:
    """The model in stages, with the same weights each time."""
    torch.manual_seed(SEED)
    blocks = [Block(size.width, size.n_heads) for _ in range(size.n_blocks)]
    per_stage = size.n_blocks // n_stages
    return [nn.Sequential(*blocks[first : first + per_stage]) for first in range(0, size.n_blocks, per_stage)]


def blocks_of(module: nn.Module) -> list[Block]:
    """The blocks of a stage, checkpointed or not."""
    return [part for part in module.modules() if isinstance(part, Block)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """What is trained for."""
    return nn.functional.mse_loss(output, target)
