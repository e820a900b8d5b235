"""What checks are made on: a small model, its gradients without regrow, and what counts as right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SESSION = "check"
ENGINES = {"hooks": False, "reentrant": True}

Found = dict[str, Any]
Call = Callable[..., Any]


class WrongError(Exception):
    """A check found something that is not right."""


class MeaninglessError(Exception):
    """A check has no meaning on this device; the text says why."""


@dataclass(frozen=True)
class Setting:
    """Where the checks run, and how thoroughly."""

    device: torch.device
    quick: bool

    @property
    def module(self) -> Any:
        """The module that drives the device."""
        return torch.get_device_module(self.device.type)

    @property
    def on_cpu(self) -> bool:
        """Whether the host itself is the device."""
        return self.device.type == "cpu"

    def pick(self, full: int, quick: int) -> int:
        """A size or a count."""
        return quick if self.quick else full

    def rng_state(self) -> Tensor:
        """Of the device's generator."""
        state: Tensor = torch.get_rng_state() if self.on_cpu else self.module.get_rng_state()
        return state

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if not self.on_cpu:
            self.module.synchronize()


class Block(nn.Module):
    """A feed-forward block with dropout that counts its runs."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        """The residual block."""
        self.runs += 1
        hidden = self.up(self.norm(x))
        self.dtypes.append(hidden.dtype)
        result: Tensor = x + self.dropout(self.down(nn.functional.gelu(hidden)))
        return result


def plain(function: Call, *args: Any) -> Any:
    """The call without a checkpoint."""
    return function(*args)


def model_and_input(
    setting: Setting, *, dropout: float = 0.0, n_blocks: int = 2, seed: int = 7
) -> tuple[nn.Sequential, Tensor]:
    """The same every time."""
    torch.manual_seed(seed)
    width, rows = setting.pick(1024, 64), setting.pick(4096, 32)
    model = nn.Sequential(*[Block(width, dropout) for _ in range(n_blocks)]).to(setting.device)
    return model, torch.randn(rows, width, device=setting.device, requires_grad=True)


def blocks_of(model: nn.Sequential) -> list[Block]:
    """Its blocks."""
    return [block for block in model if isinstance(block, Block)]


def forward(model: nn.Sequential, x: Tensor, call: Call) -> Tensor:
    """Every block through ``call``."""
    for block in model:
        x = call(block, x)
    return x


def gradients(model: nn.Sequential, x: Tensor) -> list[Tensor | None]:
    """Of the input and of every parameter; they are taken away."""
    leaves = [x, *model.parameters()]
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def expect_same(got: list[Tensor | None], want: list[Tensor | None], what: str) -> None:
    """Bit for bit."""
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if ours is None or theirs is None or not torch.equal(ours, theirs):
            far = "one is missing" if ours is None or theirs is None else f"by up to {(ours - theirs).abs().max():.3g}"
            raise WrongError(f"{what}: gradient {index} of {len(got)} is not that of plain autograd ({far})")


def expect_runs(model: nn.Sequential, runs: int, what: str) -> None:
    """Forward and replays, counted in each block."""
    counted = [block.runs for block in blocks_of(model)]
    if set(counted) != {runs}:
        raise WrongError(f"{what}: blocks ran {counted} times, not {runs} each")


def without(setting: Setting, around: Any = None, call: Call = plain, **options: Any) -> list[Tensor | None]:
    """What plain autograd gives."""
    model, x = model_and_input(setting, **options)
    with around or nullcontext():
        out = forward(model, x, call)
    out.float().square().mean().backward()
    return gradients(model, x)
