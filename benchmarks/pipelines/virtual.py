"""Pipelines in virtual time: what share of a replay's cost prefire removes, for up to hundreds of ranks, exactly.

Run it as `python benchmarks/pipelines/virtual.py`; `--help` lists the options, README.md says what the figures mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from layouts import LAYOUTS
from programs import programs_of
from results import Machine, Row, Target, chosen, console, measured, table, write_json
from simulation import WAYS, Cost, step_units

RUNTIME = [name for name, layout in LAYOUTS.items() if layout.runtime]
SIZES = "4x8,8x32"


def rows_of(name: str, n_ranks: int, n_microbatches: int, latency: float) -> Row:
    """Step times of every way on one schedule, and the shares that prefire removes."""
    layout = LAYOUTS[name]
    programs = programs_of(layout, n_ranks, n_microbatches)
    per_rank = layout.stages_per_rank
    cost = Cost(stage=2 / per_rank, blocks=4 // per_rank, latency=latency)  # the same model for every schedule
    units = {way.name: step_units(programs, way, cost) for way in WAYS.values()}
    added = units["lazy"] - units["none"]
    shares = {way: (units["lazy"] - units[way]) / added for way in ("on_wait", "on_any_wait", "default")}
    return {
        "schedule": name,
        "ranks": n_ranks,
        "stages": programs.n_stages,
        "microbatches": n_microbatches,
        "latency": latency,
        "units": units,
        "removed": shares,
    }


def targets(rows: list[Row]) -> list[Target]:
    """What is promised of a latency of one stage's forward."""
    return measured(target for row in rows if row["latency"] == 1 for target in _targets(row))


def _targets(row: Row) -> Iterator[Target]:
    where = f"{row['schedule']}, {row['ranks']} ranks, {row['microbatches']} micro-batches"
    yield Target(f"{where}, on_wait removes", row["removed"]["on_wait"], 0.40, at_least=True)
    if row["schedule"] == "DualPipeV":
        yield Target(f"{where}, on_any_wait removes", row["removed"]["on_any_wait"], 0.70, at_least=True)


def _shown(rows: list[Row]) -> Iterator[list[str] | None]:
    before = None
    for row in rows:
        size = f"{row['ranks']} x {row['microbatches']}, latency {row['latency']:g}"
        if size != before:
            yield None
        yield [
            size if size != before else "",
            row["schedule"],
            *(f"{units:g}" for units in row["units"].values()),
            *(f"{share:.0%}" for share in row["removed"].values()),
        ]
        before = size


def _numbers(sizes: str) -> Iterator[tuple[int, int]]:
    for size in sizes.split(","):
        n_ranks, n_microbatches = size.split("x")
        yield int(n_ranks), int(n_microbatches)


HEADINGS = ["ranks x micro-batches", "schedule", *WAYS, *(f"{way}\nremoves" for way in ("on_wait", "any", "default"))]


def main(
    schedules: Annotated[str | None, typer.Option(help=f"With commas; all: {', '.join(RUNTIME)}.")] = None,
    sizes: Annotated[str, typer.Option(help="RANKSxMICROBATCHES, with commas.")] = SIZES,
    latencies: Annotated[str, typer.Option(help="Of a message, in forwards of a stage, with commas.")] = "0,1",
    json: Annotated[Path | None, typer.Option(help="Write a JSON line for each schedule, size and latency.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Run torch's lists of actions in virtual time, with every way to recompute."""
    out = console()
    names = chosen(schedules, RUNTIME, "--schedules")
    rows = [
        rows_of(name, n_ranks, n_microbatches, float(latency))
        for n_ranks, n_microbatches in _numbers(sizes)
        for latency in latencies.split(",")
        for name in names
    ]
    if json is not None:
        write_json(json, rows, Machine.now())
    out.print(table("Step time in forwards of a stage, exact", HEADINGS, _shown(rows)))
    found = targets(rows)
    for target in found:
        out.print(escape(target.describe()))
    if check and not all(target.met for target in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
