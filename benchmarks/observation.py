"""What looking on costs: an event that nobody hears, events per call, and a step with the ledger on and off.

Run it as `python benchmarks/observation.py`; `--help` lists the options, README.md says what the figures mean.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from timeit import repeat
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import regrow
from figures import Spread, paired_ratios
from harness import SEED, collector_at_rest, one_thread
from regrow._core import events

EVENT_NS, EVENTS, RATIO = 60.0, 6, 1.10  # what regrow promises
LENGTH = 200


def chain(x: Tensor) -> Tensor:
    """Tiny operations that save one tensor each."""
    for _ in range(LENGTH):
        x = x.sin()
    return x


def silent_event_ns(n: int) -> float:
    """Nanoseconds of an event with no listener: the look at who listens, as engines do it."""
    timed = min(repeat("if events.listeners: emit()", "emit = None", number=n, repeat=9, globals={"events": events}))
    return timed / n * 1e9


def events_of(program: Any) -> int:
    """The most events that a call has in a program."""
    heard: list[Any] = []
    events.listen(heard.append)
    try:
        program(torch.randn(16, requires_grad=True))
    finally:
        events.leave(heard.append)
    return max(Counter(event.call for event in heard if hasattr(event, "call")).values())


def plain_step(x: Tensor) -> None:
    """One backward."""
    regrow.checkpoint(chain, x).sum().backward()


def split_step(x: Tensor) -> None:
    """Prefire, two passes that share it, clear."""
    with regrow.recompute_handle_collector_ctx() as handles:
        loss = regrow.checkpoint(chain, x).sum()
    regrow.recompute_handle(handles[0], "s")
    for retain in (True, False):
        with regrow.recompute_session_ctx("s", retain_on_unpack=retain):
            torch.autograd.grad(loss, x, retain_graph=retain)
    regrow.clear_recompute_session("s")


def ratio_with_ledger(program: Any, rounds: int, repeats: int) -> Spread:
    """Time of a step with the ledger on, over that with it off, in turn and in pairs."""
    x = torch.randn(16, requires_grad=True)
    times: dict[bool, list[float]] = {False: [], True: []}
    order, draw = [False, True], random.Random(SEED)
    with one_thread(), collector_at_rest():
        for number in range(rounds + 2):
            draw.shuffle(order)
            for on in order:
                taken = _time(program, x, repeats, regrow.ledger() if on else nullcontext())
                if number >= 2:
                    times[on].append(taken)
    return Spread.of(paired_ratios(times[True], times[False]))


def _time(program: Any, x: Tensor, repeats: int, around: AbstractContextManager[Any]) -> float:
    gc.collect()
    with around:
        began = perf_counter_ns()
        for _ in range(repeats):
            program(x)
        return float(perf_counter_ns() - began)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of samples.")] = 60,
    quick: Annotated[bool, typer.Option("--quick", help="A few short rounds, to see that everything runs.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure what looking on costs."""
    torch.manual_seed(SEED)
    event_ns = silent_event_ns(1_000 if quick else 1_000_000)
    n_events = max(events_of(plain_step), events_of(split_step))
    plain, split = (ratio_with_ledger(program, 3 if quick else rounds, 5) for program in (plain_step, split_step))
    lines = (
        ("an event that nobody hears", f"{event_ns:.0f} ns", f"{EVENT_NS:.0f} ns", event_ns <= EVENT_NS),
        (f"events of a call with {LENGTH} saved tensors", str(n_events), str(EVENTS), n_events <= EVENTS),
        (f"step of {LENGTH} tiny operations, ledger on", _shown(plain), f"{RATIO:.2f}", plain.median <= RATIO),
        ("the same with prefire, dx and dw", _shown(split), "", True),
    )
    for name, found, target, met in lines:
        sys.stdout.write(
            f"{name:<48} {found:>20}  {f'at most {target}' if target else '':<15}{'' if met else 'missed'}\n"
        )
    if check and not all(met for *_, met in lines):
        raise typer.Exit(1)


def _shown(spread: Spread) -> str:
    return f"{spread.median:.2f} [{spread.lower:.2f}, {spread.upper:.2f}]"


if __name__ == "__main__":
    typer.run(main)
