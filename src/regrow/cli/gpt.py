"""A small GPT on bytes, cut into stages, which counts its own runs. Must never know how, or why, a block is run again.

Each block has 12 parameters in 6 groups (ln1, qkv, proj, ln2, fc1, fc2): a group is what a split backward computes the
parameter gradients of in one go. Every part draws its parameters from a seed of its own: the model is the same however
it is cut, and a rank makes only what it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # a token is a byte
PARAMETER_GROUPS = 6  # of a block


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the model is."""

    n_blocks: int = 4
    width: int = 256
    n_heads: int = 4
    length: int = 128
    dropout: float = 0.1


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a perceptron, each added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n_heads = shape.n_heads
        self.ln1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.ln2 = nn.LayerNorm(shape.width)
        self.fc1 = nn.Linear(shape.width, 4 * shape.width)
        self.fc2 = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.n_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Run the block, and count it: every replay comes through here too."""
        self.n_runs += 1
        x = x + self.dropout(self.proj(self._attend(self.ln1(x))))
        out: Tensor = x + self.dropout(self.fc2(functional.gelu(self.fc1(self.ln2(x)))))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3 * self.n_heads, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = mixed.transpose(1, 2).flatten(2)
        return joined


BlockRunner = Callable[[Block, Tensor], Tensor]


class Embedding(nn.Module):
    """Bytes (batch, length) to floats (batch, length, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.length, shape.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Add up what is known of each byte and of its place."""
        embedded: Tensor = self.tokens(tokens) + self.positions
        return embedded


class Head(nn.Sequential):
    """Floats to logits: (batch, length, vocabulary)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(nn.LayerNorm(shape.width), nn.Linear(shape.width, VOCABULARY))


class StageModule(nn.Module):
    """What one stage runs: its blocks, the embedding before the first one of all, the head after the last one.

    Attributes:
        n_forwards: how many micro-batches came through; blocks that ran more often were replayed.
    """

    def __init__(self, shape: Shape, place: range, run_block: BlockRunner, *, seed: int) -> None:
        super().__init__()
        self.embedding = _seeded(Embedding, shape, seed, 0) if place.start == 0 else nn.Identity()
        self.blocks = nn.ModuleList([_seeded(Block, shape, seed, 1 + index) for index in place])
        last = place.stop == shape.n_blocks
        self.head = _seeded(Head, shape, seed, 1 + shape.n_blocks) if last else nn.Identity()
        self.n_forwards = 0
        self._run_block = run_block

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage, each block as it is or under a checkpoint."""
        self.n_forwards += 1
        x = self.embedding(x)
        for block in self._counted():
            x = self._run_block(block, x)
        out: Tensor = self.head(x)
        return out

    def forget_runs(self) -> None:
        """Count from now on."""
        self.n_forwards = 0
        for block in self._counted():
            block.n_runs = 0

    def replays(self) -> list[float]:
        """How often each block ran beyond its forwards, per forward."""
        return [(block.n_runs - self.n_forwards) / self.n_forwards for block in self._counted()]

    def _counted(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]


def blocks_of(stage: int, n_stages: int, n_blocks: int) -> range:
    """Which blocks a stage runs: all stages alike, or the later ones one more."""
    return range(stage * n_blocks // n_stages, (stage + 1) * n_blocks // n_stages)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a micro-batch, given the byte that follows each position."""
    mean: Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return mean


def _seeded(part: Callable[[Shape], nn.Module], shape: Shape, seed: int, index: int) -> nn.Module:
    torch.manual_seed((seed << 20) + index)
    return part(shape)
