"""What one saved region costs and holds, next to other ways. Must never time variants apart.

Run it as `python benchmarks/save_regions/measure.py`; `--help` lists the options, README.md says what figures mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ways
from blocks import Block, Chain
from figures import Spread, paired_ratios
from harness import SEED, Phase, Plan, Variant, check_same, measure, one_thread
from regrow.cli import memory
from regrow.cli.memory import Footprint, Marks
from report import Machine, duration

WIDTH, LENGTH, BATCH, HEADS = 512, 256, 1, 8
AT_MOST = 0.95  # of the step time of torch's selective checkpoint, and no more bytes
COLUMNS = 120
MARKS = Marks(step="a step", backward="its backward")


@dataclass(frozen=True, slots=True)
class Figures:
    """One way to run a block."""

    held: Footprint
    step_ns: Spread
    ratio: Spread


def footprint(run: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> Footprint:
    """Bytes of a step, by the profiler's allocation events."""

    def step() -> None:
        with record_function(MARKS.step):
            output = run(x)
            with record_function(MARKS.backward):
                output.backward(gradient)

    with one_thread():
        found = memory.measure(step, torch.device("cpu"), MARKS)
    assert found is not None
    return found


def figures(block: nn.Module, x: Tensor, kept: list[object], plan: Plan) -> dict[str, Figures]:
    """Check that all ways do the same, count what they hold, and time them in turn."""
    found = ways.of(block, kept)
    variants = [Variant(name, lambda run=run: run(x)) for name, run in found.items()]  # type: ignore[misc]
    gradient = torch.ones_like(x)
    check_same(variants, [x, *block.parameters()], gradient)
    held = {name: footprint(run, x, gradient) for name, run in found.items()}
    times = measure(variants, gradient, repeats=1, plan=plan)[Phase.STEP]
    return {
        name: Figures(held[name], Spread.of(times[name]), Spread.of(paired_ratios(times[name], times[ways.REFERENCE])))
        for name in found
    }


def table(title: str, found: dict[str, Figures]) -> Table:
    """A row for each way."""
    shown = Table(title=title)
    for heading in ("", "bytes before backward", "bytes at most", "step", "ratio to torch SAC"):
        shown.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for name, row in found.items():
        ratio = f"{row.ratio.median:.3f} [{row.ratio.lower:.3f}, {row.ratio.upper:.3f}]"
        bytes_held = (f"{row.held.retained_bytes:,}", f"{row.held.peak_bytes:,}")
        shown.add_row(name, *bytes_held, duration(row.step_ns.median), ratio)
    return shown


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each way.")] = 40,
    quick: Annotated[bool, typer.Option("--quick", help="Small blocks and few rounds: everything runs.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure a saved region in a chain and in a transformer block."""
    console = Console() if Console().is_terminal else Console(width=COLUMNS)
    console.print(escape(Machine.now().describe()))
    torch.manual_seed(SEED)
    width, length = (64, 32) if quick else (WIDTH, LENGTH)
    plan = Plan(rounds=2 if quick else rounds, warm_up=1 if quick else 3)
    x = torch.randn(BATCH, length, width, requires_grad=True)
    chain = figures(Chain(width), x, [torch.ops.aten.mm.default], plan)
    console.print(table(f"RMSNorm, matmul (kept), GELU: batch {BATCH}, sequence {length}, width {width}", chain))
    block = figures(Block(width, HEADS), x, ways.attention_operators(), plan)
    console.print(table(f"Transformer block, attention kept: batch {BATCH}, sequence {length}, width {width}", block))
    mine, theirs = block[ways.REGROW], block[ways.REFERENCE]
    missed = []
    if mine.ratio.median > AT_MOST:
        missed.append(f"step time {mine.ratio.median:.3f} of torch SAC's, target {AT_MOST}")
    if mine.held.retained_bytes > theirs.held.retained_bytes:
        missed.append(f"{mine.held.retained_bytes:,} bytes, torch SAC {theirs.held.retained_bytes:,}")
    console.print(f"targets missed: {'; '.join(missed) or 'none'}")
    if check and missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
