"""One step, cut as a zero-bubble schedule cuts it. Must never know which variant it runs.

    forward 0 .. n-1  |  prefire 0, dx 0, dw 0, clear 0  |  prefire 1, dx 1, dw 1, clear 1  | ...

Every variant takes this same way. Where a block is plain, or under torch's checkpoint, there are no handles, and the
session has nothing to share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from regrow.cli._compat import stage_backward_input, stage_backward_weight
from regrow.cli.corpus import MicroBatch
from regrow.cli.gpt import GPT, BlockRunner
from regrow.scheduling import (
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)

FORWARD = "regrow demo: forward"
BACKWARD = "regrow demo: backward"


@dataclass(frozen=True, slots=True)
class Pending:
    """A micro-batch between its forward and its backward."""

    embedded: Tensor
    region_input: Tensor
    loss: Tensor
    handles: list[Any]  # opaque to whoever schedules


def run_step(model: GPT, micro_batches: Sequence[MicroBatch], run_block: BlockRunner) -> Tensor:
    """Accumulate the gradients of a step into ``.grad``.

    Args:
        model: what is trained.
        micro_batches: the step's data.
        run_block: how a block is called.

    Returns:
        The mean loss of the micro-batches, detached.

    Memory: a micro-batch's activations are let go with the end of its own backward.
    """
    with record_function(FORWARD):
        pending = deque(_forward(model, batch, run_block, len(micro_batches)) for batch in micro_batches)
        loss = torch.stack([each.loss.detach() for each in pending]).sum()
    with record_function(BACKWARD):
        for index in range(len(micro_batches)):
            _backward(model, pending.popleft(), ("micro_batch", index))
    return loss


def _forward(model: GPT, batch: MicroBatch, run_block: BlockRunner, n_micro_batches: int) -> Pending:
    embedded = model.embed(batch.tokens)
    region_input = embedded.detach().requires_grad_()
    with recompute_handle_collector_ctx() as handles:
        loss = model.loss(region_input, batch.targets, run_block) / n_micro_batches
    return Pending(embedded, region_input, loss, handles)


def _backward(model: GPT, pending: Pending, session_id: tuple[str, int]) -> None:
    parameters = model.region_parameters()
    try:
        for handle in pending.handles:
            recompute_handle(handle, session_id)
        with recompute_session_ctx(session_id, retain_on_unpack=True):
            (dx,), groups = stage_backward_input([pending.loss], None, [pending.region_input], iter(parameters))
        with recompute_session_ctx(session_id, retain_on_unpack=False):
            stage_backward_weight(iter(parameters), groups)
    finally:
        clear_recompute_session(session_id)
    torch.autograd.backward(pending.embedded, dx)
