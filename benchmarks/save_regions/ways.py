"""Ways to run a block and keep one part of it. Must never do more than a user of each would write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import regrow

PLAIN, REFERENCE, REGROW, PEER = "no checkpoint", "torch SAC", "regrow, region", "torch-remat"

Run = Callable[[Tensor], Tensor]


def of(block: nn.Module, kept: list[Any]) -> dict[str, Run]:
    """Every way by name; that of torch-remat where it is installed.

    Args:
        block: called as ``block(x)`` or ``block(x, region)``.
        kept: the operators of the part, for policies.
    """
    contexts = partial(create_selective_checkpoint_contexts, kept)
    found: dict[str, Run] = {
        PLAIN: block,
        "torch": partial(torch_checkpoint, block, use_reentrant=False),
        REFERENCE: partial(torch_checkpoint, block, use_reentrant=False, context_fn=contexts),
        "regrow": partial(regrow.checkpoint, block),
        "regrow, policy": partial(
            regrow.checkpoint, block, context_fn=partial(regrow.create_selective_checkpoint_contexts, kept)
        ),
        REGROW: lambda x: regrow.checkpoint(block, x, regrow.save_region),
    }
    if find_spec("torch_remat") is not None:
        found[PEER] = _torch_remat(block)
    return found


def _torch_remat(block: nn.Module) -> Run:
    remat = import_module("torch_remat")

    def region(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        output: Tensor = remat.region(function, "part", recompute=False)(*args)
        remat.recompute_needs_tensor(output)
        return output

    def run(x: Tensor) -> Tensor:
        output: Tensor = remat.checkpoint(region_name="block")(block)(x, region)
        return output

    return run


def attention_operators() -> list[Any]:
    """What ``scaled_dot_product_attention`` runs as, whatever the device."""
    names = ("_flash_attention_for_cpu", "_flash_attention", "_efficient_attention", "_cudnn_attention")
    return [getattr(torch.ops.aten, f"_scaled_dot_product{name}").default for name in names]
