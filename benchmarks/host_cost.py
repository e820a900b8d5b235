"""What a checkpoint costs on the host, as a ladder: plain, floor, regrow, torch. Must never time by itself.

Run it as `python benchmarks/host_cost.py`; `--help` lists the options, README.md says what the figures mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

import variants
from figures import PLAIN, RatioOf, compare
from harness import SEED, Phase, Plan, check_same, measure
from report import Machine, Row, duration, table, write_json
from variants import REENTRANT, REGROW, Function

FULL = Plan(rounds=60, warm_up=5)
QUICK = Plan(rounds=5, warm_up=1)
WIDTH = 140  # of the table, where no terminal says its own


@dataclass(frozen=True, slots=True)
class Targets:
    """What is promised for the reentrant engine, of the time that torch's two checkpoints add."""

    of_torch: Mapping[Phase, float] = field(default_factory=dict)
    of_reentrant: Mapping[Phase, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """A function, its input, and what regrow promises for it."""

    name: str
    function: Function
    x: Tensor
    repeats: int
    ratio_of: RatioOf
    targets: Mapping[Phase, float]  # at most this much of torch's
    reentrant: Targets  # the same for the reentrant engine
    parameters: Sequence[Tensor] = field(default=())


def operations(length: int, *, repeats: int, targets: Mapping[Phase, float], reentrant: Targets) -> Case:
    """A chain of tiny operations that save one tensor each: next to no arithmetic, so what is seen is the host."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(length):
            x = x.sin()
        return x

    name = f"{length} operation{'s' if length > 1 else ''}"
    return Case(name, chain, torch.randn(16, requires_grad=True), repeats, RatioOf.ADDED, targets, reentrant)


def block(*, width: int, length: int, batch: int) -> Case:
    """A transformer block: how much of the cost is left to see next to real arithmetic."""
    layer = nn.TransformerEncoderLayer(
        width, nhead=8, dim_feedforward=4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    x = torch.randn(batch, length, width, requires_grad=True)
    name, targets = f"block {batch}x{length}x{width}", {Phase.STEP: 1.02}
    return Case(name, layer, x, 1, RatioOf.TOTAL, targets, Targets(), tuple(layer.parameters()))


def cases(*, quick: bool) -> tuple[Case, Case, Case]:
    """Many operations, one operation, a block. The quick ones show that everything runs, their times say little."""
    torch.manual_seed(SEED)
    return (
        operations(
            200,
            repeats=2 if quick else 5,
            targets={Phase.FORWARD: 0.40, Phase.STEP: 0.48},
            reentrant=Targets({Phase.STEP: 0.18}, {Phase.STEP: 1.0}),
        ),
        operations(
            1,
            repeats=10 if quick else 100,
            targets={Phase.FORWARD: 0.35, Phase.STEP: 0.35},
            reentrant=Targets({}, {Phase.STEP: 0.6}),
        ),
        block(width=64, length=32, batch=2) if quick else block(width=512, length=256, batch=2),
    )


def run(case: Case, plan: Plan) -> list[Row]:
    """Check that all variants of a case do the same, then time them."""
    ladder = variants.of(case.function, case.x)
    gradient = torch.ones_like(case.x)
    check_same(ladder, [case.x, *case.parameters], gradient)
    samples = measure(ladder, gradient, repeats=case.repeats, plan=plan)
    n_saved = variants.count_saved(case.function, case.x)
    promised = {REGROW: case.targets, REENTRANT: case.reentrant.of_torch}
    rows = [
        Row(
            case=case.name,
            phase=phase,
            variant=name,
            repeats=case.repeats,
            n_saved=n_saved,
            figures=figures,
            ratio_of=case.ratio_of,
            at_most=promised.get(name, {}).get(phase),
        )
        for phase in Phase
        for name, figures in compare(samples[phase]).items()
    ]
    seconds = case.reentrant.of_reentrant
    return rows + [
        replace(row, ratio_of=RatioOf.REENTRANT, at_most=seconds[row.phase])
        for row in rows
        if row.variant == REENTRANT and row.phase in seconds
    ]


def prices(many: Sequence[Row], one: Sequence[Row]) -> Table:
    """The added cost for each saved tensor, from many operations, and for each call, from one operation."""
    shown = Table(title=f"Added cost: {many[0].case} shared out among {many[0].n_saved} saved tensors; {one[0].case}")
    shown.add_column("variant")
    per_saved = {(row.variant, row.phase): row.added_per_saved_ns for row in many}
    per_call = {(row.variant, row.phase): row.figures.added_ns.median for row in one}
    for unit in ("saved tensor", "call"):
        for phase in Phase:
            shown.add_column(f"{phase.value}\nper {unit}", justify="right")
    for name in dict.fromkeys(row.variant for row in many if row.variant != PLAIN):
        costs = [cost[name, phase] for cost in (per_saved, per_call) for phase in Phase]
        shown.add_row(name, *map(duration, costs))
    return shown


def _whose(row: Row) -> str:
    return "" if row.variant in (PLAIN, REGROW) else f", {row.variant}, ratio of {row.ratio_of.value} time"


def main(
    rounds: Annotated[int | None, typer.Option(min=1, help="Samples of each variant: 60, with --quick 5.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few short rounds, to see that everything runs.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write a JSON line for each case, phase and variant.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure what a checkpoint costs on the host, next to torch's own in the same run."""
    machine = Machine.now()
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    usual = QUICK if quick else FULL
    plan = Plan(rounds or usual.rounds, usual.warm_up)
    console.print(escape(machine.describe()))
    results = []
    for case in cases(quick=quick):
        # A line, not a progress bar: its thread would take turns with what is timed.
        console.print(f"{case.name}: {plan.warm_up} + {plan.rounds} rounds of {case.repeats}")
        results.append(run(case, plan))
    rows = [row for result in results for row in result]
    if json is not None:
        write_json(json, rows, machine)
    console.print(table(rows), prices(results[0], results[1]))
    missed = [f"{row.case}, {row.phase.value}{_whose(row)}" for row in rows if row.met is False]
    console.print(f"targets missed: {'; '.join(missed) or 'none'}")
    if check and missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
