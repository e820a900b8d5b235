"""The variants: how a block is called, by whose stage, and what is attached. Must never train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.utils.checkpoint
from torch import Tensor
from torch.distributed.pipelining import PipelineStage as TorchStage

from regrow.call import checkpoint
from regrow.cli.gpt import Block, BlockRunner
from regrow.pipelining import PipelineStage


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to train, and its name.

    Attributes:
        stage: the class of its stages.
        attached: options of `regrow.pipelining.attach`; None where nothing is attached.
    """

    name: str
    run_block: BlockRunner
    stage: type = TorchStage
    attached: dict[str, Any] | None = None


def plain_block(block: Block, x: Tensor) -> Tensor:
    """As it is."""
    out: Tensor = block(x)
    return out


def torch_block(block: Block, x: Tensor) -> Tensor:
    """Under torch's checkpoint."""
    out: Tensor = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return out


def regrow_block(block: Block, x: Tensor) -> Tensor:
    """Under regrow's."""
    out: Tensor = checkpoint(block, x)
    return out


# The first is what the others are measured against; the third places nothing, the last does what attach does by itself.
VARIANTS = (
    Variant("no checkpoint", plain_block),
    Variant("torch", torch_block),
    Variant("regrow, lazily", regrow_block, PipelineStage, {"prefire": "off", "keep": "never"}),
    Variant("regrow, prefired", regrow_block, PipelineStage, {}),
)
