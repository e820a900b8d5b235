"""Streams: replays on a stream of their own, while forward's has other work. For devices that have streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import regrow
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
    without,
)


def side_stream(setting: Setting) -> Found:
    """Replays fired on a stream of their own, behind slow work, while forward's stream has other work.

    A reader that does not wait finds memory of before, or the poison that is written wherever memory was given away too
    early. Every round has other numbers, so that what a round left behind is wrong in the next.
    """
    if setting.on_cpu:
        raise MeaninglessError("the CPU has no streams")
    side, beside, rounds = setting.module.Stream(), 0, setting.pick(10, 2)
    for seed in range(rounds):
        for name, around in surroundings(setting).items():
            for engine, reentrant in ENGINES.items():
                call = partial(regrow.checkpoint, use_reentrant=reentrant)
                what = f"{engine} engine, {name}, on a stream of its own"
                was_beside = one_beside(setting, side, call, around, seed, what)
                beside += was_beside and not reentrant  # that engine's replays are on forward's stream
    if not beside:
        raise WrongError("nothing ran beside a replay")
    return {"rounds": rounds, "replays beside which forward's stream got work done": beside}


def surroundings(setting: Setting) -> dict[str, Callable[[], Any]]:
    """What forward and prefire happen in."""
    return {
        "plain": nullcontext,
        "autocast": partial(torch.autocast, setting.device.type, dtype=torch.bfloat16),
        "save_on_cpu": partial(save_on_cpu, pin_memory=not setting.quick),
    }


def one_beside(setting: Setting, side: Any, call: Call, around: Call, seed: int, what: str) -> bool:
    """One model; whether forward's stream had done its work before the replay had."""
    want = without(setting, around(), seed=seed)
    model, x = model_and_input(setting, seed=seed)
    with around():
        with regrow.recompute_handle_collector_ctx() as handles:
            out = forward(model, x, call)
        setting.wait()
        with setting.module.stream(side):
            slow(setting)
            for handle in reversed(handles):
                regrow.recompute_handle(handle, SESSION)
            end = side.record_event()
        casts = blocks_of(model)[0].up(x.detach())  # finds no cast of the replay
    poison(x)
    done = setting.module.current_stream().record_event()
    done.synchronize()
    was_beside = not end.query()
    slow(setting)  # so that the host comes far ahead of what reads
    dx = dx_and_dw(out, x)
    with setting.module.stream(side):
        poison(x)  # of memory that is free by now, on the stream that it came from
    regrow.clear_recompute_session(SESSION)
    found = gradients(model, x)
    expect_same(found, want, what)
    expect_same([dx], found[:1], f"{what}, dx")
    expect_runs(model, 2, what)
    with around():
        expect_same([casts], [blocks_of(model)[0].up(x.detach())], f"{what}, beside it")
    return was_beside


def dx_and_dw(out: Tensor, x: Tensor) -> Tensor:
    """Both halves, with nothing in between that waits for the device; gives dx."""
    loss = out.float().square().mean()
    with regrow.recompute_session_ctx(SESSION, retain_on_unpack=True):
        (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    with regrow.recompute_session_ctx(SESSION):
        loss.backward()
    return dx


def slow(setting: Setting) -> None:
    """Work that takes a while, on the current stream."""
    a = torch.ones(setting.pick(4096, 64), setting.pick(4096, 64), device=setting.device)
    for _ in range(20):
        a = a @ a * 1e-4


def poison(like: Tensor) -> None:
    """Fill memory that is free with what no result contains; it is free again."""
    nothing = [
        torch.full((rows * like.numel(),), float("nan"), device=like.device) for rows in (1, 4) for _ in range(8)
    ]
    del nothing
