"""A small GPT on bytes, which counts its own runs. Must never know how, or why, a block is run again.

Each block has 12 parameters in 6 groups (ln1, qkv, proj, ln2, fc1, fc2): a group is what a split backward computes the
parameter gradients of in one go.
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


class GPT(nn.Module):
    """The model in the two parts that a split backward sees: the embedding, and the region above it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.length, shape.width))
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.n_blocks)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY)
        self.n_forwards = 0

    def embed(self, tokens: Tensor) -> Tensor:
        """What enters the region: (batch, length) bytes to (batch, length, width) floats."""
        embedded: Tensor = self.tokens(tokens) + self.positions
        return embedded

    def loss(self, embedded: Tensor, targets: Tensor, run_block: BlockRunner) -> Tensor:
        """Run the region: blocks, head and loss.

        Args:
            embedded: from `embed`.
            targets: the byte that follows each position.
            run_block: calls a block, as it is or under a checkpoint.
        """
        self.n_forwards += 1
        x = embedded
        for block in self.blocks:
            assert isinstance(block, Block)
            x = run_block(block, x)
        logits = self.head(self.norm(x))
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss

    def region_parameters(self) -> list[nn.Parameter]:
        """The parameters that dw is for: all but the embedding's."""
        return [p for part in (self.blocks, self.norm, self.head) for p in part.parameters()]

    def replays(self) -> list[float]:
        """How often each block ran beyond its forwards, per forward."""
        runs = [block.n_runs for block in self.blocks if isinstance(block, Block)]
        return [(n_runs - self.n_forwards) / self.n_forwards for n_runs in runs]
