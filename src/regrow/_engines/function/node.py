"""Node: the autograd Function that stands for a call in the graph. Must never run the function of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from regrow._engines.function.passes import arrive
from regrow._engines.function.replay import ReentrantFrame


class Recomputed(torch.autograd.Function):
    """Outputs that were computed without a graph, and the frame that can compute them with one.

    The node owns the frame. Its first input is the frame's trigger, the others are the tensors of the call.
    """

    @staticmethod
    def forward(ctx: Any, frame: ReentrantFrame, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Hand the outputs on to autograd."""
        ctx.frame = frame
        ctx.set_materialize_grads(False)
        outputs, frame.fresh = frame.fresh, None
        assert outputs is not None
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """What the frame gives."""
        trigger, found = arrive(ctx.frame, ctx, grads)
        return None, trigger, *found


apply: Callable[..., tuple[torch.Tensor, ...]] = Recomputed.apply
