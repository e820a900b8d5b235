"""Data and tensor parallel training on two ranks, in one launch: each program returns what its test asserts.

torchrun --standalone --nproc-per-node 2 -m tests.parallel.two_ranks FOLDER
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import regrow

RANKS = 2
WIDTH = 8
ROWS = 4  # of the whole batch
N_BLOCKS = 3
STEPS = 3


class Block(nn.Module):
    """A residual block that counts its runs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Blocks, each of which is called as ``call`` says."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(N_BLOCKS))
        self.call: Callable[..., Any] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x

    def runs_so_far(self) -> list[int]:
        """Runs since they were last counted."""
        return [block.runs for block in self.blocks]

    def counted(self) -> list[int]:
        """Runs since the last time."""
        runs = self.runs_so_far()
        for block in self.blocks:
            block.runs = 0
        return runs


def two_models(**options: Any) -> tuple[Net, Net]:
    """One to train in parallel, and the oracle: the same in one piece, without a checkpoint."""
    torch.manual_seed(0)
    plain = Net(**options)
    return copy.deepcopy(plain), plain


def batch(step: int) -> torch.Tensor:
    """The whole batch; a rank trains on its share."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def share(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(RANKS)[dist.get_rank()]


def whole_grads(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the mean over the whole batch."""
    model.zero_grad()
    model(x).square().sum(1).mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def close(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """The same but for the order in which ranks are added up."""
    return len(got) == len(want) and all(
        torch.allclose(mine, yours, rtol=1e-5, atol=1e-6) for mine, yours in zip(got, want, strict=True)
    )


class CountedAllGather(DefaultAllGather):
    """FSDP2's own way to gather, counted."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        CountedAllGather.calls += 1
        return super().__call__(*args, **kwargs)


class Collectives(TorchDispatchMode):
    """Counts those that tensor parallelism calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func.__name__.partition(".")[0] != "wait_tensor":
            self.calls += 1
        return func(*args, **(kwargs or {}))


def order_of_forward(model: Any) -> int:
    """How many modules FSDP2 has noted in the order of forward, which it prefetches by."""
    groups = [module._get_fsdp_state()._fsdp_param_group for module in model.blocks]
    return len(groups[0].comm_ctx.post_forward_order)


def sharded(where: str, reshard: bool, mode: str, *, use_reentrant: bool) -> dict[str, Any]:
    """FSDP2 with the checkpoint inside or around the sharded module; the whole function is replayed."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model, plain = two_models()
    options = {"use_reentrant": True} if use_reentrant else {"early_stop": False}
    if where == "inside":
        regrow.apply_checkpointing(model, Block, **options)
    else:
        model.call = partial(regrow.checkpoint, **options)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard).set_custom_all_gather(CountedAllGather())
    fully_shard(model, mesh=mesh)
    found: dict[str, Any] = {"same": [], "gathered": [], "order": [], "runs": [], "early": []}
    for step in range(STEPS):
        CountedAllGather.calls = 0
        model.zero_grad()
        name = ("step", step)
        with (
            regrow.recompute_session_ctx(name, retain_on_unpack=True),
            regrow.recompute_handle_collector_ctx() as handles,
        ):
            loss = model(share(batch(step)).requires_grad_()).square().sum(1).mean()
            for handle in reversed(handles) if mode != "lazy" else ():
                regrow.recompute_handle(handle, name, carrier=mode == "carrier")
        found["order"].append(order_of_forward(model))
        found["early"].append(model.runs_so_far())
        with regrow.recompute_session_ctx(name):
            loss.backward()
        regrow.clear_recompute_session(name)
        grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
        found["same"].append(close(grads, whole_grads(plain, batch(step))))
        found["gathered"].append(CountedAllGather.calls)
        found["runs"].append(model.counted())
    return found


def replicated(option: str, *, use_reentrant: bool) -> dict[str, Any]:
    """DDP: hooks after accumulation run once for each parameter and backward; gradients are those of one process."""
    model, plain = two_models()
    regrow.apply_checkpointing(model, Block, use_reentrant=use_reentrant)
    arguments = {"static_graph": {"static_graph": True}, "unused": {"find_unused_parameters": True}}.get(option, {})
    replica = DistributedDataParallel(model, **arguments)
    hooked = [0]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: hooked.append(hooked.pop() + 1))
    found: dict[str, Any] = {"same": [], "hooked": [], "runs": []}
    for step in range(STEPS):
        model.zero_grad()
        hooked[0] = 0
        parts = share(batch(step)).chunk(2) if option == "no_sync" else [share(batch(step))]
        for index, part in enumerate(parts):
            with replica.no_sync() if index < len(parts) - 1 else nullcontext():
                (replica(part.clone().requires_grad_()).square().sum(1).mean() / len(parts)).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        found["same"].append(close(grads, whole_grads(plain, batch(step))))
        found["hooked"].append(hooked[0])
        found["runs"].append(model.counted())
    return found


def tensor_parallel(dropout: float, *, early_stop: bool = True, use_reentrant: bool) -> dict[str, Any]:
    """Blocks whose layers are split over ranks: gradients, and the collectives of forward and backward."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found: dict[str, Any] = {}
    grads = {}
    for name in ("plain", "checkpoint"):
        torch.manual_seed(0)
        model = Net(dropout)
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if name == "checkpoint":
            regrow.apply_checkpointing(model, Block, early_stop=early_stop, use_reentrant=use_reentrant)
        x = batch(0).requires_grad_()
        torch.manual_seed(5)
        with Collectives() as forward:
            loss = model(x).square().sum(1).mean()
        with Collectives() as backward:
            loss.backward()
        grads[name] = [_local(parameter.grad) for parameter in model.parameters()] + [x.grad]
        found[name] = [forward.calls, backward.calls]
        found[f"{name} runs"] = model.counted()
    found["same"] = all(map(torch.equal, grads["checkpoint"], grads["plain"]))
    if not dropout:
        _, oracle = two_models()
        x = batch(0).requires_grad_()
        oracle(x).square().sum(1).mean().backward()
        found["whole"] = torch.allclose(grads["checkpoint"][-1], x.grad, atol=1e-6)
    return found


def random_placement(*, use_reentrant: bool) -> dict[str, Any]:
    """Dropout on a sharded tensor: the replay draws what forward drew."""
    mesh: DeviceMesh = init_device_mesh("cpu", (RANKS,))
    from torch.distributed.tensor import Shard, distribute_tensor

    runs = [0]

    def block(t: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        return nn.functional.dropout(t.sin(), 0.5).cos()

    grads = []
    for call in (lambda f, t: f(t), partial(regrow.checkpoint, use_reentrant=use_reentrant)):
        torch.manual_seed(3)
        runs[0] = 0
        x = distribute_tensor(batch(0), mesh, [Shard(0)]).requires_grad_()
        call(block, x).sum().backward()
        grads.append(_local(x.grad))
    return {"same": torch.equal(*grads), "dropped": bool((grads[0] == 0).any()), "runs": runs[0]}


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


ENGINES = {"hooks": False, "reentrant": True}
WHERE, MODES, DDP = ("inside", "around"), ("lazy", "bare", "carrier"), ("plain", "no_sync", "static_graph", "unused")
PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"{engine}: FSDP2 {where}, reshard {reshard}, {mode}": partial(
            sharded, where, reshard, mode, use_reentrant=reentrant
        )
        for engine, reentrant in ENGINES.items()
        for where in WHERE
        for reshard in (True, False)
        for mode in MODES
    },
    **{
        f"{engine}: DDP {option}": partial(replicated, option, use_reentrant=reentrant)
        for engine, reentrant in ENGINES.items()
        for option in DDP
    },
    **{
        f"{engine}: tensor parallel, dropout {dropout}": partial(tensor_parallel, dropout, use_reentrant=reentrant)
        for engine, reentrant in ENGINES.items()
        for dropout in (0.0, 0.5)
    },
    "hooks: tensor parallel, the whole function": partial(tensor_parallel, 0.0, early_stop=False, use_reentrant=False),
    **{
        f"{engine}: random placement": partial(random_placement, use_reentrant=reentrant)
        for engine, reentrant in ENGINES.items()
    },
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for name, program in PROGRAMS.items():
        try:
            results[name] = program()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
        Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
