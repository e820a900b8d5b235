"""What gpu_check.py checks. A check gives what it found, or raises. The oracle is plain autograd on the same device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import ScheduleZBVZeroBubble

import regrow
import variants
from figures import RatioOf, compare
from harness import Plan, measure
from regrow.cli import memory
from regrow.pipelining import PipelineStage, attach
from stream_checks import side_stream
from subject import (
    ENGINES,
    SESSION,
    Call,
    Found,
    MeaninglessError,
    Setting,
    WrongError,
    blocks_of,
    expect_runs,
    expect_same,
    forward,
    gradients,
    model_and_input,
    plain,
    without,
)


def on_each_engine(check: Callable[[Setting, Call], Found]) -> Callable[[Setting], Found]:
    """A check that is made with each engine's checkpoint."""

    def both(setting: Setting) -> Found:
        found = {}
        for name, reentrant in ENGINES.items():
            try:
                found[name] = check(setting, partial(regrow.checkpoint, use_reentrant=reentrant))
            except WrongError as error:  # noqa: PERF203 - it says whose
                raise WrongError(f"{name} engine: {error}") from None
        return found

    return both


def prefired(model: nn.Sequential, x: Tensor, call: Call, around: Any = None) -> Tensor:
    """Forward, inside ``around``; then, outside, numbers are drawn and every block is replayed, the last one first."""
    with regrow.recompute_handle_collector_ctx() as handles, around or nullcontext():
        out = forward(model, x, call)
    torch.rand(3, device=x.device)
    for handle in reversed(handles):
        regrow.recompute_handle(handle, SESSION)
    expect_runs(model, 2, "prefire")
    return out


def dx_and_dw(model: nn.Sequential, x: Tensor, out: Tensor, run: Callable[..., Any] = plain) -> list[Tensor | None]:
    """Gradients of both halves, in a session that is opened here, wherever ``run`` runs them; it is cleared."""
    loss = out.float().square().mean()
    try:
        with regrow.recompute_session_ctx(SESSION, retain_on_unpack=True):
            (dx,) = run(torch.autograd.grad, loss, x, None, True)
        with regrow.recompute_session_ctx(SESSION):
            run(loss.backward)
    finally:
        regrow.clear_recompute_session(SESSION)
    found = gradients(model, x)
    expect_same([dx], found[:1], "dx next to the whole backward")
    expect_runs(model, 2, "dx and dw")
    return found


@on_each_engine
def random_numbers(setting: Setting, call: Call) -> Found:
    """Dropout of a replay that is fired after the device's generator has moved on, and that must not move it."""
    model, x = model_and_input(setting, dropout=0.3)
    out = prefired(model, x, call)
    state = setting.rng_state()
    expect_same(dx_and_dw(model, x, out), without(setting, dropout=0.3), "dropout")
    model, x = model_and_input(setting, dropout=0.3)
    forward(model, x, plain)
    torch.rand(3, device=x.device)
    if not torch.equal(state, setting.rng_state()):
        raise WrongError("a replay moved the generator")
    return {"replays": 1}


@on_each_engine
def mixed_precision(setting: Setting, call: Call) -> Found:
    """A replay that is fired outside autocast computes in bfloat16, as forward did."""
    model, x = model_and_input(setting)
    out = prefired(model, x, call, torch.autocast(setting.device.type, dtype=torch.bfloat16))
    seen = {dtype for block in blocks_of(model) for dtype in block.dtypes}
    if seen != {torch.bfloat16}:
        raise WrongError(f"products were computed in {seen}")
    want = without(setting, torch.autocast(setting.device.type, dtype=torch.bfloat16))
    expect_same(dx_and_dw(model, x, out), want, "autocast")
    return {"replays": 1}


class Witness(torch.autograd.Function):
    """Notes the threads that backward runs on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threads: set[int]) -> Tensor:
        """Save something, so that backward reads."""
        ctx.save_for_backward(x)
        ctx.threads = threads
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Read it, and note the thread."""
        _ = ctx.saved_tensors
        ctx.threads.add(threading.get_ident())
        return grad * 2, None


@on_each_engine
def worker_threads(setting: Setting, call: Call) -> Found:
    """Backward finds its session on a thread that has none of the caller's context variables."""
    threads: set[int] = set()

    def witnessed(call: Call) -> Call:
        return lambda block, x: call(lambda t: Witness.apply(block(t), threads), x)  # type: ignore[no-untyped-call]

    want = without(setting, call=witnessed(plain))
    threads.clear()
    model, x = model_and_input(setting)
    out = prefired(model, x, witnessed(call))
    # The CPU's backward runs where it is called: a bare thread stands for the worker of a device.
    found = dx_and_dw(model, x, out, run=on_a_bare_thread if setting.on_cpu else plain)
    expect_same(found, want, "on another thread")
    if not threads or threading.get_ident() in threads:
        raise WrongError("backward ran on the calling thread, so nothing was shown")
    return {"threads": len(threads)}


def on_a_bare_thread(work: Call, *args: Any) -> Any:
    """Run it on a thread of its own, which is joined; what it raises is raised here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args).result()


def bytes_at_peak(setting: Setting) -> Found:
    """The most that a step holds above what was there before: plain, torch's checkpoint, both engines."""
    marks = memory.Marks("step", "backward")

    def peak(call: Call) -> int:
        model, x = model_and_input(setting, n_blocks=8)

        def step() -> None:
            with torch.profiler.record_function("step"):
                loss = forward(model, x, call).square().mean()
                with torch.profiler.record_function("backward"):
                    loss.backward()

        if setting.on_cpu:
            found = memory.measure(step, setting.device, marks)
            if found is None:
                raise MeaninglessError("the profiler reports no allocations here")
            return found.peak_bytes
        step()
        setting.wait()
        before = setting.module.memory_allocated()
        setting.module.reset_peak_memory_stats()
        step()
        setting.wait()
        return int(setting.module.max_memory_allocated() - before)

    found = {name: peak(call) for name, call in contenders().items()}
    for name, peer in (("hooks", "torch"), ("reentrant", "torch reentrant")):
        if found[name] > 1.02 * found[peer] or found[name] >= found["plain"]:
            raise WrongError(f"the {name} engine holds more than torch's checkpoint, or than none: {found}")
    return found


def contenders() -> dict[str, Call]:
    """Ways to make a call."""
    theirs = torch.utils.checkpoint.checkpoint
    ours = {name: partial(regrow.checkpoint, use_reentrant=reentrant) for name, reentrant in ENGINES.items()}
    peers = {"torch": partial(theirs, use_reentrant=False), "torch reentrant": partial(theirs, use_reentrant=True)}
    return {"plain": plain, **peers, **ours}


def host_cost(setting: Setting) -> Found:
    """Time that a checkpoint adds on the host, of the time that torch's adds; medians of paired rounds. No verdict."""
    found: Found = {}
    plan = Plan(rounds=setting.pick(30, 3), warm_up=setting.pick(3, 1))
    for length, repeats in ((200, 2), (1, 50)):

        def chain(x: Tensor, length: int = length) -> Tensor:
            for _ in range(length):
                x = x.sin()
            return x

        x = torch.randn(16, device=setting.device, requires_grad=True)
        samples = measure(variants.of(chain, x), torch.ones_like(x), repeats=repeats, plan=plan)
        setting.wait()
        for phase, times in samples.items():
            for name, figures in compare(times).items():
                spread = figures.ratios[RatioOf.ADDED]
                if spread is not None and name not in ("plain", "torch"):
                    found[f"{length} operations, {phase.value}, {name}"] = round(spread.median, 3)
    return found


@on_each_engine
def zero_bubble(setting: Setting, call: Call) -> Found:
    """A step of ZBV at world size 1: one replay for each block and micro-batch, gradients as without checkpoints."""
    if find_spec("numpy") is None:
        raise MeaninglessError("torch's pipelines need NumPy")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    n_microbatches, found = 4, []
    for stage_class, how in ((TorchStage, plain), (PipelineStage, call)):
        model, x = model_and_input(setting, n_blocks=2)
        x.requires_grad_(False)
        parts = [Through(block, how) for block in model]
        stages: list[Any] = [stage_class(part, index, 2, setting.device) for index, part in enumerate(parts)]
        schedule = ScheduleZBVZeroBubble(stages, n_microbatches, loss_fn=nn.functional.mse_loss)
        if stage_class is PipelineStage:
            attach(schedule, keep="never")
        for _ in range(2):  # the first step learns shapes, and what dw reads
            model.zero_grad()
            before = [block.runs for block in blocks_of(model)]
            schedule.step(x, target=torch.zeros_like(x))
        runs = [block.runs - then for block, then in zip(blocks_of(model), before, strict=True)]
        found.append((runs, [p.grad for p in model.parameters()]))
    (_, want), (runs, got) = found
    expect_same(got, want, "ZBV")
    if set(runs) != {2 * n_microbatches}:
        raise WrongError(f"blocks ran {runs} times for {n_microbatches} micro-batches, not {2 * n_microbatches}")
    return {"replays of each block and micro-batch": 1}


class Through(nn.Module):
    """A module that is called as ``how`` says."""

    def __init__(self, block: nn.Module, how: Call) -> None:
        super().__init__()
        self.block = block
        self.how = how

    def forward(self, x: Tensor) -> Any:
        """Call it so."""
        return self.how(self.block, x)


CHECKS: dict[str, Callable[[Setting], Found]] = {
    "random numbers": random_numbers,
    "mixed precision": mixed_precision,
    "worker threads": worker_threads,
    "side stream": side_stream,
    "bytes at peak": bytes_at_peak,
    "zero bubble": zero_bubble,
    "host cost": host_cost,
}
