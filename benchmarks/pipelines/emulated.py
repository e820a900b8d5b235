"""Pipelines with emulated arithmetic on four ranks: what prefire removes where messages take time.

Run it as `python benchmarks/pipelines/emulated.py`; `--help` lists the options, README.md says what the figures mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.markup import escape

from emulation import EMULATED, Times, emulate
from layouts import LAYOUTS
from programs import programs_of
from ranks import on_ranks
from results import Machine, Row, Target, chosen, console, measured, table, write_json
from simulation import WAYS, Cost, step_units

RUNTIME = [name for name, layout in LAYOUTS.items() if layout.runtime]
N_RANKS = 4
N_MICROBATCHES = 8


def rows_of(name: str, unit_s: float, latencies: list[float], rounds: int) -> list[Row]:
    """A row for each latency: step times of every contender, next to those in virtual time."""
    layout = LAYOUTS[name]
    cost = Cost(stage=2 / layout.stages_per_rank, blocks=4 // layout.stages_per_rank)
    ranks = on_ranks(N_RANKS, emulate, name, N_MICROBATCHES, cost, unit_s, latencies, rounds)
    programs = programs_of(layout, N_RANKS, N_MICROBATCHES)
    rows = []
    for latency in latencies:
        exact = {way: step_units(programs, WAYS[way], replace(cost, latency=latency)) for way in EMULATED}
        rows.append(_row(name, latency, _units(ranks, latency, unit_s), exact))
    return rows


def _units(ranks: list[Times], latency: float, unit_s: float) -> dict[str, list[float]]:
    """The slowest rank of each round, in units."""
    return {
        name: [max(of_ranks) / unit_s for of_ranks in zip(*(rank[latency][name] for rank in ranks), strict=True)]
        for name in EMULATED
    }


def _row(name: str, latency: float, units: dict[str, list[float]], exact: dict[str, float]) -> Row:
    medians = {way: median(of_rounds) for way, of_rounds in units.items()}
    return {
        "schedule": name,
        "ranks": N_RANKS,
        "microbatches": N_MICROBATCHES,
        "latency": latency,
        "rounds": len(units["none"]),
        "units": medians,
        "virtual_units": exact,
        "to_virtual": {way: medians[way] / exact[way] for way in medians},
        "removed": {way: _removed(units, way) for way in ("on_wait", "on_any_wait")},
    }


def _removed(units: dict[str, list[float]], way: str) -> float:
    """The share of the replay's cost, within rounds."""
    return median(
        (lazy - this) / (lazy - none) for none, lazy, this in zip(units["none"], units["lazy"], units[way], strict=True)
    )


def targets(rows: list[Row]) -> list[Target]:
    """What is promised of a latency of one stage's forward, and of all steps next to virtual time."""
    return measured(target for row in rows for target in _targets(row))


def _targets(row: Row) -> Iterator[Target]:
    where = f"{row['schedule']}, latency {row['latency']:g}"
    if row["latency"] == 1:
        yield Target(f"{where}, on_wait removes", row["removed"]["on_wait"], 0.30, at_least=True)
    if row["latency"] == 1 and row["schedule"] == "DualPipeV":
        yield Target(f"{where}, on_any_wait removes", row["removed"]["on_any_wait"], 0.50, at_least=True)
    worst = max(row["to_virtual"], key=lambda way: abs(row["to_virtual"][way] - 1))
    yield Target(f"{where}, {worst}, step time next to virtual", abs(row["to_virtual"][worst] - 1), 0.25)


def _shown(rows: list[Row]) -> Iterator[list[str] | None]:
    before = None
    for row in rows:
        if row["schedule"] != before:
            yield None
        yield [
            row["schedule"] if row["schedule"] != before else "",
            f"{row['latency']:g}",
            *(f"{row['units'][way]:.1f} ({row['virtual_units'][way]:g})" for way in EMULATED),
            *(f"{share:.0%}" for share in row["removed"].values()),
        ]
        before = row["schedule"]


HEADINGS = ["schedule", "latency", *EMULATED, "on_wait\nremoves", "on_any_wait\nremoves"]


def main(
    schedules: Annotated[str | None, typer.Option(help=f"With commas; all: {', '.join(RUNTIME)}.")] = None,
    latencies: Annotated[str, typer.Option(help="Of a message, in forwards of a stage, with commas.")] = "0,1",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each contender that are timed.")] = 3,
    unit_ms: Annotated[float, typer.Option(min=1.0, help="Of a stage's forward: long next to what is real.")] = 60.0,
    json: Annotated[Path | None, typer.Option(help="Write a JSON line for each schedule and latency.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Train a model that sleeps on four ranks, with every schedule that runs a list of actions."""
    machine, out = Machine.now(), console()
    out.print(escape(machine.describe()))
    rows: list[Row] = []
    for name in chosen(schedules, RUNTIME, "--schedules"):
        out.print(f"{name}: {rounds} rounds")
        rows += rows_of(name, unit_ms / 1e3, [float(latency) for latency in latencies.split(",")], rounds)
        if json is not None:
            write_json(json, rows, machine)  # what is there stays, if a later schedule fails
    title = f"Step time in forwards of a stage, {unit_ms:g} ms; in brackets the same in virtual time"
    out.print(table(title, HEADINGS, _shown(rows)))
    found = targets(rows)
    for target in found:
        out.print(escape(target.describe()))
    if check and not all(target.met for target in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
