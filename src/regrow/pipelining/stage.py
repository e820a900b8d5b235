"""PipelineStage: torch's stage, which also owns the replays of its micro-batches, and splits backward itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.nn.parallel import DistributedDataParallel

from regrow._core.replaying import plain_calls
from regrow._core.split import Split, edges_of
from regrow.pipelining import _compat
from regrow.pipelining.microbatch import MicroBatch
from regrow.pipelining.plan import Plan
from regrow.pipelining.sites import Sites
from regrow.pipelining.told import told

Outputs = tuple[torch.Tensor, ...]
Grads = tuple[torch.Tensor | None, ...]


# "forward" or "backward", the stage that sends it, the micro-batch.
Message = tuple[str, int, int]


@dataclass(slots=True)
class Messages:
    """What a step sent, and what it posted receives for, in order."""

    sent: list[Message] = field(default_factory=list)
    posted: list[Message] = field(default_factory=list)

    def clear(self) -> None:
        """Begin anew."""
        self.sent.clear()
        self.posted.clear()


class PipelineStage(TorchStage):
    """A stage whose checkpointed modules are replayed once per micro-batch, whatever the schedule cuts backward into.

    A drop-in for ``torch.distributed.pipelining.PipelineStage``, for every schedule of torch. It owns the life of its
    micro-batches' replays: forward collects them, dx retains what they bring back, dw lets it go, and the end of the
    micro-batch, or an exception, clears the rest. Modules may be checkpointed anywhere in it, or nowhere.

    Backward is split by regrow: gradients are those of one full backward also where a parameter is used at several
    places of the stage, and hooks of parameters run as in one full backward.

    Args:
        submodule: what the stage runs.
        stage_index: its place in the pipeline, from 0.
        num_stages: how many stages there are.
        device: where it runs.
        **options: as torch's: ``input_args``, ``output_args``, ``output_grads``, ``input_grads``, ``group``,
            ``dw_builder``, ``get_mesh``.

    Attributes:
        messages: what this step sent and posted receives for.
        retention_misses: how often dw read a value that had been let go after dx, and a call was replayed once more.

    Raises:
        ValueError: in dx or dw, if the module is wrapped by DDP with ``find_unused_parameters``.

    Memory: a micro-batch's replays are held from prefire, or from the first read in its backward, until it is finished.
        Between dx and dw: what ``retention`` says, and one gradient per place where parameters join.

    Threads: as torch's stage, one at a time.

    Source: torch 2.13, distributed/pipelining/stage.py, for what it overrides.
    """

    def __init__(
        self, submodule: nn.Module, stage_index: int, num_stages: int, device: torch.device, **options: Any
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, **options)
        self._plan = Plan()
        self._sites = Sites(submodule)
        self._follows: Callable[[int, int], bool] | None = None
        self._microbatches: dict[int, MicroBatch] = {}
        self._begun: set[int] = set()
        self.messages = Messages()

    @property
    def plan(self) -> Plan:
        """What `attach` decided, while the attached schedule takes a step; else replays come when backward asks."""
        return self._plan

    def follow(self, plan: Plan, follows: Callable[[int, int], bool] | None) -> None:
        """Follow a plan from now on.

        Args:
            plan: what is done with replays.
            follows: whether the backward of (stage_index, microbatch) comes right after its forward; None if unknown.
        """
        self._plan, self._follows = plan, follows

    @property
    def retention_misses(self) -> int:
        """How often dw read a value that had been let go after dx."""
        return self._sites.misses

    def prefire(self, microbatch: int, *, full: bool) -> None:
        """Replay the calls of a micro-batch before its backward.

        Args:
            microbatch: its number; one without calls, or whose backward has begun, is left alone.
            full: whether the backward to come is a full one, which ``prefire_bytes`` bounds. Of the first stage it
                always is: it computes nothing in dx, and all in dw.
        """
        waiting = self._microbatches.get(microbatch)
        if waiting is None or microbatch in self._begun:
            return
        limit = self.plan.prefire_bytes if full or self.is_first else float("inf")
        waiting.prefire(limit, carrier=isinstance(self.submod, _compat.FSDPModule))

    def is_due(self, microbatch: int) -> bool:
        """Whether a micro-batch's backward is still to come."""
        return microbatch not in self._begun

    def forget(self) -> None:
        """Let go of everything that an aborted step left, replays and torch's own."""
        for microbatch in self._microbatches.values():
            microbatch.clear()
        for left in (
            self._microbatches,
            self._begun,
            self.fwd_cache,
            self.bwd_cache,
            self.output_chunks,
            self.backward_state,
            self.dw_runner,
        ):
            left.clear()

    def clear_runtime_states(self) -> None:
        """Begin a step."""
        self.forget()
        self.messages.clear()
        super().clear_runtime_states()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Forward of one micro-batch."""
        with told("F", self.stage_index, fwd_chunk_id), self._forward_of(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output=save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro-batch, or its first half."""
        self._begun.add(bwd_chunk_id)
        kind = "B" if full_backward else "dx"
        with told(kind, self.stage_index, bwd_chunk_id), self._backward_of(bwd_chunk_id, full=full_backward):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The second half of one micro-batch's backward."""
        microbatch = self._microbatches.pop(bwd_chunk_id, None)
        dw = nullcontext() if microbatch is None else microbatch.dw()
        with told("dw", self.stage_index, bwd_chunk_id), dw:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """One backward in the way that the wrapper for data parallelism wants; halves are regrow's own."""
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if isinstance(self.submod, _compat.FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "input":
            return self._dx(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        with self._synchronising(last=last_backward):
            bwd_kwargs["param_groups"].dw()
        return (), None

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What to send to the next stage."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        self.messages.sent += [("forward", self.stage_index, fwd_chunk_id)] if operations else []
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What to send to the previous stage."""
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        self.messages.sent += [("backward", self.stage_index, bwd_chunk_id)] if operations else []
        return operations

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What to receive from the previous stage."""
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        self.messages.posted += [("forward", self.stage_index - 1, fwd_chunk_id)] if operations else []
        return operations

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What to receive from the next stage."""
        operations = super().get_bwd_recv_ops(bwd_chunk_id)
        self.messages.posted += [("backward", self.stage_index + 1, bwd_chunk_id)] if operations else []
        return operations

    def receives(self, kind: str, microbatch: int) -> list[dist.P2POp]:
        """The receives of one message, once more: it was sent, and this stage never came to post them."""
        return super().get_fwd_recv_ops(microbatch) if kind == "forward" else super().get_bwd_recv_ops(microbatch)

    def shapes(self, kind: str) -> list[tuple[torch.Size, torch.dtype, int]]:
        """Shape, type and receiving rank of the tensors of a message that this stage sends."""
        peer = self.stage_index_to_group_rank[self.stage_index + (1 if kind == "forward" else -1)]
        return [(meta.shape, meta.dtype, peer) for meta in _compat.metas_of(self, kind) if meta is not None]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradients for a previous stage on this rank; none in evaluation, where torch's stage raises."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take them."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _compute_outputs(self, *args: torch.Tensor, module: nn.Module, **kwargs: Any) -> Any:
        """Infer shapes, without checkpoints: nothing of it is trained."""
        with plain_calls():
            return super()._compute_outputs(*args, module=module, **kwargs)

    @contextmanager
    def _forward_of(self, index: int) -> Iterator[None]:
        if not self.has_backward:
            yield
        elif self._keeps(index):
            with plain_calls():
                yield
        else:
            microbatch = MicroBatch(f"stage {self.stage_index}, micro-batch {index}", self._sites)
            self._microbatches[index] = microbatch
            with microbatch.collecting():
                yield

    def _keeps(self, index: int) -> bool:
        follows = self._follows is not None and self._follows(self.stage_index, index)
        return self.plan.keeps(self.stage_index, index, follows=follows)

    @contextmanager
    def _backward_of(self, index: int, *, full: bool) -> Iterator[None]:
        microbatch = self._microbatches.get(index)
        if microbatch is None or (self.is_first and not full and self.dw_builder is None):
            yield  # the first stage of a split computes nothing here
        elif full:
            del self._microbatches[index]
            with microbatch.full():
                yield
        else:
            with microbatch.dx(self.plan.retention_of(self.stage_index, index)):
                yield

    def _dx(self, outputs: Outputs, output_grads: Grads | None, inputs: list[Any]) -> tuple[Grads, Split]:
        # Gradients of keyword arguments go nowhere; what they are made of gets its gradient in dw, like a parameter.
        n_args = len(_compat.metas_of(self, "input"))
        split = Split(edges_of(outputs), edges_of(inputs[:n_args]))
        grads = [torch.ones_like(output) for output in outputs] if output_grads is None else output_grads
        found = split.dx(grads)
        for output in outputs:
            # A view cannot be cut off in place; it goes when dw has run. A leaf is no result of this graph.
            if output.grad_fn is not None and not output._is_view():
                output.detach_()
        return (*found, *(None for _ in inputs[n_args:])), split

    @contextmanager
    def _synchronising(self, *, last: bool) -> Iterator[None]:
        """DDP reduces what is accumulated inside, after the last micro-batch; before, it must not."""
        module = self.submod
        if not isinstance(module, DistributedDataParallel):
            yield
        elif not last:
            with module.no_sync():
                yield
        elif module.find_unused_parameters:
            raise ValueError(
                f"stage {self.stage_index} is wrapped by DistributedDataParallel with find_unused_parameters=True, "
                "which cannot tell in a split backward what is unused. Set it to False, or shard the stage with FSDP2 "
                "(torch.distributed.fsdp.fully_shard)."
            )
        else:
            module.reducer.prepare_for_backward([])
            yield
