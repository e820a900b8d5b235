"""Node: the autograd Function that stands for a call in the graph. Must never run the function of the call."""

from __future__ import annotations

from typing import Any

import torch

from regrow._core import compat
from regrow._engines.function import _compat
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


_apply = _compat.apply_of(Recomputed)


def node_of(frame: ReentrantFrame, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Give the frame's outputs a node, and get them back with it."""
    if compat.functorch_active():  # in the replay of a call around this one, inside a vmapped backward: torch refuses
        joined: tuple[torch.Tensor, ...] = Recomputed.apply(frame, frame.trigger, *tensors)  # type: ignore[no-untyped-call]
        return joined
    return _apply(frame, frame.trigger, *tensors)
