"""What a call's replay holds between dx and dw, by engine and retention. Counts bytes, so it needs no quiet machine.

Run it as `python benchmarks/retention.py`. The unit is one activation of the block's width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import regrow
from regrow._core import compat
from regrow._core.split import Split, edges_of
from regrow.pipelining.microbatch import MicroBatch
from regrow.pipelining.sites import Sites

WIDTH, LENGTH, BATCH = 256, 128, 2
UNIT_BYTES = BATCH * LENGTH * WIDTH * 4


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a feed-forward layer, each with a residual."""
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return result


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a micro-batch's replays hold at three places, without parameters."""

    prefired: int
    after_dx: int
    after_dw: int


def measure(*, use_reentrant: bool, retention: str) -> Held:
    """The second of two micro-batches: the first one teaches the engine on hooks what dw reads."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    regrow.apply_checkpointing(model, Block, use_reentrant=use_reentrant)
    sites, own = Sites(model), {compat.storage_key(parameter) for parameter in model.parameters()}
    *_, last = (_step(model, sites, own, retention) for _ in range(2))
    return last


def _step(model: nn.Module, sites: Sites, own: set[int | None], retention: str) -> Held:
    microbatch = MicroBatch("micro-batch", sites)
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    with microbatch.collecting():
        output = model(x)
    microbatch.prefire(float("inf"), carrier=False)
    prefired = _held(microbatch, own)
    split = Split(edges_of([output]), edges_of([x]))
    with microbatch.dx(retention):
        split.dx([torch.ones_like(output)])
    after_dx = _held(microbatch, own)
    with microbatch.dw():
        split.dw()
    return Held(prefired, after_dx, _held(microbatch, own))


def _held(microbatch: MicroBatch, own: set[int | None]) -> int:
    held: dict[int, int] = {}
    for _, frame in microbatch._alive():
        held.update(frame.held(frame.bound))
    return sum(size for storage, size in held.items() if storage not in own)


def rows() -> Iterator[tuple[str, str, Held]]:
    """Both engines, each retention."""
    for name, use_reentrant in (("hooks", False), ("reentrant", True)):
        for retention in ("all", "needed", "none"):
            yield name, retention, measure(use_reentrant=use_reentrant, retention=retention)


def main() -> None:
    """Print the table."""
    shown = Table(title=f"Held by the replays of two blocks, in activations of {UNIT_BYTES / 2**20:.2f} MiB")
    shown.add_column("engine")
    shown.add_column("retention")
    for place in ("prefired", "after dx", "after dw"):
        shown.add_column(place, justify="right")
    for name, retention, held in rows():
        places = (held.prefired, held.after_dx, held.after_dw)
        shown.add_row(name, retention, *(f"{size / UNIT_BYTES:.1f}" for size in places))
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
