"""The contenders: ways to train a pipeline that should give the same gradients. Must never measure.

Each says which stage class it takes, how a block is checkpointed, and what is done to the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import regrow
from regrow.pipelining import PipelineStage, attach

NONE, TORCH = "none", "torch"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train."""

    name: str
    stage: type[TorchStage]
    checkpoint: Callable[[nn.Module], nn.Module]  # of one block
    prepare: Callable[[Any], object]  # the schedule, before its first step


class TorchCheckpointed(nn.Module):
    """A block under torch's own checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        """The block's output; backward runs the block again."""
        return torch_checkpoint(self.block, x, use_reentrant=False)


class GraftStage(TorchStage):
    """Recomputation without hooks: forward leaves no graph, and before backward the whole stage runs again with one.

    That graph takes the place of what forward left in ``fwd_cache``, and torch's stage goes on with it. The last stage
    has its loss already, which hangs on the graph of forward: it keeps it.

    Limits: a stage is all or nothing, a full backward holds all of it, and random numbers are not restored, which the
    model does not draw.
    """

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage."""
        with torch.set_grad_enabled(self.is_last):
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def graft(self, microbatch: int) -> None:
        """Run a micro-batch again, with a graph; again it does nothing."""
        outputs, inputs = self.fwd_cache[microbatch]
        if not outputs[0].requires_grad:
            self.fwd_cache[microbatch] = ((self.submod(*inputs),), inputs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro-batch, or its first half, which is empty on the first stage."""
        if full_backward or not self.is_first:
            self.graft(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The second half; on the first stage this is all of backward."""
        if self.is_first:
            inputs, groups, _, output_grads = self.backward_state[bwd_chunk_id]
            self.backward_state[bwd_chunk_id] = (inputs, groups, (self.submod(*inputs),), output_grads)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)


class GraftingReceives(dict[Any, Any]):
    """Receives of gradients that were posted; before one is taken out to be waited for, its stage runs again."""

    def __init__(self, stages: list[GraftStage], split: set[tuple[int, int]]) -> None:
        super().__init__()
        self._stages = {stage.stage_index: stage for stage in stages}
        self._split = split

    def pop(self, key: tuple[int, int], *default: Any) -> Any:
        """Take a receive out."""
        stage = self._stages[key[0]]
        if not (stage.is_first and key in self._split):
            stage.graft(key[1])
        return super().pop(key, *default)


def leave(anything: Any) -> Any:
    """Change nothing."""
    return anything


def graft_before_waits(schedule: Any) -> None:
    """Place the grafts of a schedule where its rank waits for a gradient, if it runs a list of actions."""
    if not hasattr(schedule, "bwd_recv_ops"):
        return
    actions = schedule.pipeline_order_with_comms[schedule.rank]
    flat = [part for action in actions for part in action.sub_actions or (action,)]
    split = {
        (action.stage_index, action.microbatch_index)
        for action in flat
        if action.computation_type.name == "BACKWARD_INPUT"
    }
    schedule.bwd_recv_ops = GraftingReceives(schedule._stages, split)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(NONE, TorchStage, leave, leave),
        Contender(TORCH, TorchStage, TorchCheckpointed, leave),
        Contender("lazy", PipelineStage, regrow.checkpoint_wrapper, partial(attach, prefire="off", keep="never")),
        Contender("prefire", PipelineStage, regrow.checkpoint_wrapper, partial(attach, keep="never")),
        Contender("default", PipelineStage, regrow.checkpoint_wrapper, attach),
        Contender("retain all", PipelineStage, regrow.checkpoint_wrapper, partial(attach, retention="all")),
        Contender("retain none", PipelineStage, regrow.checkpoint_wrapper, partial(attach, retention="none")),
        Contender("graft", GraftStage, leave, graft_before_waits),
    )
}
