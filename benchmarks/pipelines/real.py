"""Pipelines with real arithmetic on two ranks: step time, runs of a block, peak bytes. Must never time by itself.

Run it as `python benchmarks/pipelines/real.py`; `--help` lists the options, README.md says what the figures mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.markup import escape

from contenders import CONTENDERS, NONE, TORCH
from layouts import LAYOUTS
from model import Size
from ranks import on_ranks
from results import Machine, Row, Target, chosen, console, measured, table, write_json
from training import Observed, train

N_RANKS = 2
SMALL = Size(n_blocks=4, width=32, n_heads=2, length=16, microbatch=1, n_microbatches=4)
MIB = 2**20
Ranks = list[dict[str, Observed]]  # what each rank saw, by contender


def rows_of(layout: str, ranks: Ranks) -> list[Row]:
    """A row for each contender on one schedule."""
    times = {name: _step_s(ranks, name) for name in ranks[0]}
    return [_row(layout, name, ranks, times) for name in ranks[0]]


def _row(layout: str, name: str, ranks: Ranks, times: dict[str, list[float]]) -> Row:
    runs = {stage: count for rank in ranks for stage, count in rank[name].runs.items()}
    return {
        "schedule": layout,
        "contender": name,
        "rounds": len(times[name]),
        "step_s": median(times[name]),
        "to_none": _paired(times[name], times[NONE]),
        "to_torch": _paired(times[name], times[TORCH]),
        "runs": [runs[stage] for stage in sorted(runs)],
        "peak_bytes": [rank[name].peak_bytes for rank in ranks],
        "peak_to_none": [rank[name].peak_bytes / rank[NONE].peak_bytes for rank in ranks],
        "same_gradients": all(rank[name].same_gradients for rank in ranks),
    }


def _step_s(ranks: Ranks, name: str) -> list[float]:
    """The slowest rank of each round."""
    return [max(of_ranks) for of_ranks in zip(*(rank[name].step_s for rank in ranks), strict=True)]


def _paired(times: list[float], base: list[float]) -> float:
    return median(time / other for time, other in zip(times, base, strict=True))


def targets(rows: list[Row]) -> list[Target]:
    """What is promised of step times, peaks, runs and gradients."""
    by_name = {(row["schedule"], row["contender"]): row for row in rows}
    return measured([*_times(by_name), *_peaks(by_name), *_gradients(rows)])


def _times(rows: dict[tuple[str, str], Row]) -> Iterator[Target]:
    for layout in ("InterleavedZB", "ZBV"):
        row = rows.get((layout, "default"), {})
        yield Target(f"{layout}, default, step time to torch", row.get("to_torch"), 0.55)
        yield Target(f"{layout}, default, step time to none", row.get("to_none"), 1.25)


def _peaks(rows: dict[tuple[str, str], Row]) -> Iterator[Target]:
    torch_peaks = rows.get(("ZBV", TORCH), {}).get("peak_to_none")
    for name, at_most in (("retain all", 1.01), ("default", 0.86), ("retain none", 0.69)):
        peaks = rows.get(("ZBV", name), {}).get("peak_to_none")
        yield Target(f"ZBV, {name}, peak of rank 1 to none", peaks and peaks[1], at_most)
        yield Target(f"ZBV, {name}, peak of rank 1 to torch", peaks and torch_peaks and peaks[1] / torch_peaks[1], 1.0)


def _gradients(rows: list[Row]) -> Iterator[Target]:
    same = sum(row["same_gradients"] for row in rows) / len(rows)
    yield Target("gradients bit for bit those of none", same, 1.0, at_least=True)


def _shown(rows: list[Row]) -> Iterator[list[str] | None]:
    before = None
    for row in rows:
        if row["schedule"] != before:
            yield None
        yield [row["schedule"] if row["schedule"] != before else "", row["contender"], *_figures(row)]
        before = row["schedule"]


def _figures(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['step_s'] * 1e3:.0f} ms",
        f"{row['to_none']:.2f}",
        f"{row['to_torch']:.2f}",
        ", ".join(f"{runs:g}" for runs in row["runs"]),
        " / ".join(f"{peak / MIB:.1f}" for peak in row["peak_bytes"]),
        "same" if row["same_gradients"] else "DIFFERENT",
    ]


HEADINGS = ["schedule", "contender", "step", "to none", "to torch", "runs by stage", "peak MiB by rank", "gradients"]


def main(
    schedules: Annotated[str | None, typer.Option(help=f"With commas; all: {', '.join(LAYOUTS)}.")] = None,
    contenders: Annotated[str | None, typer.Option(help=f"With commas; all: {', '.join(CONTENDERS)}.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each contender that are timed.")] = 10,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, two rounds: times say nothing.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write a JSON line for each schedule and contender.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Train on two ranks with every schedule and every contender; `none` and `torch` always take part."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of the ranks: the profiler warns of what we leave out
    machine, out = Machine.now(), console()
    out.print(escape(machine.describe()))
    picked = chosen(contenders, CONTENDERS, "--contenders")
    names = [name for name in CONTENDERS if name in {NONE, TORCH, *picked}]
    size, rounds = (SMALL, min(rounds, 2)) if quick else (Size(), rounds)
    rows: list[Row] = []
    for layout in chosen(schedules, LAYOUTS, "--schedules"):
        out.print(f"{layout}: {rounds} rounds of {len(names)} contenders")
        rows += rows_of(layout, on_ranks(N_RANKS, train, layout, names, size, rounds))
        if json is not None:
            write_json(json, rows, machine)  # what is there stays, if a later schedule fails
    out.print(table(f"{N_RANKS} ranks, {size}", HEADINGS, _shown(rows)))
    found = list(_gradients(rows)) if quick else targets(rows)
    for target in found:
        out.print(escape(target.describe()))
    if check and not all(target.met for target in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
