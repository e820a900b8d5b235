"""Rows of results, as JSON lines and as tables. Must never measure, nor know a case."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import regrow
from figures import PLAIN, Figures, RatioOf, Spread
from harness import Phase


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures were taken on, and how busy it was."""

    regrow: str
    torch: str
    python: str
    platform: str
    cpu_count: int | None
    load_average: float | None  # of the minute before the start; None where the system does not tell

    @classmethod
    def now(cls) -> Machine:
        """This machine, as it is now."""
        return cls(
            regrow=regrow.__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            platform=platform.platform(),
            cpu_count=os.cpu_count(),
            load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        )

    def describe(self) -> str:
        """One line for a reader."""
        load = "unknown" if self.load_average is None else f"{self.load_average:.2f}"
        return (
            f"regrow {self.regrow}, torch {self.torch}, Python {self.python}, {self.platform}, "
            f"{self.cpu_count} cores, load average at start {load}"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One variant in one case and phase."""

    case: str
    phase: Phase
    variant: str
    repeats: int
    n_saved: int
    figures: Figures
    ratio_of: RatioOf  # which ratio says most here
    at_most: float | None  # what the median of that ratio may be: the target

    @property
    def ratio(self) -> Spread | None:
        """The ratio that says most; None if no round could be compared."""
        return self.figures.ratios[self.ratio_of]

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target. A ratio that could not be taken does not meet it."""
        return None if self.at_most is None else self.ratio is not None and self.ratio.median <= self.at_most

    @property
    def added_per_saved_ns(self) -> float:
        """The added cost, shared out among the saved tensors."""
        return self.figures.added_ns.median / self.n_saved

    def fields(self, machine: Machine) -> dict[str, Any]:
        """What a line of JSON holds."""
        ratios = {f"{of.value}_ratio": spread and asdict(spread) for of, spread in self.figures.ratios.items()}
        return {
            "case": self.case,
            "phase": self.phase.value,
            "variant": self.variant,
            "repeats": self.repeats,
            "n_saved": self.n_saved,
            "n_samples": self.figures.time_ns.n,
            "time_ns": asdict(self.figures.time_ns),
            "added_ns": asdict(self.figures.added_ns),
            "added_per_saved_ns": self.added_per_saved_ns,
            **ratios,
            "ratio": f"{self.ratio_of.value}_ratio",
            "target": self.at_most,
            "met": self.met,
            **asdict(machine),
        }


def write_json(path: Path, rows: Iterable[Row], machine: Machine) -> None:
    """Write one line for each row."""
    path.write_text("".join(f"{json.dumps(row.fields(machine))}\n" for row in rows), encoding="utf-8")


def table(rows: Sequence[Row]) -> Table:
    """All rows, a section for each case and phase."""
    shown = Table(title="One step: median over rounds, quartiles in brackets")
    shown.add_column("case, phase", no_wrap=True)
    shown.add_column("variant", no_wrap=True)
    for heading in ("time", "min", "added", "ratio to torch", "target"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for (case, phase, ratio_of), section in groupby(rows, key=lambda row: (row.case, row.phase, row.ratio_of)):
        about = (case, phase.value, f"ratio of {ratio_of.value} time")
        for row, first in zip(section, chain(about, repeat("")), strict=False):
            shown.add_row(first, row.variant, *_cells(row))
        shown.add_section()
    return shown


def duration(ns: float) -> str:
    """A time for a reader, in the unit that suits it."""
    unit, size = _unit(ns)
    return f"{_scaled(ns, size)} {unit}"


def _unit(ns: float) -> tuple[str, float]:
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= size:
            return unit, size
    return "ns", 1.0


def _scaled(ns: float, size: float) -> str:
    return f"{ns / size:.{2 if abs(ns) < 10 * size else 1}f}"


def _cells(row: Row) -> list[str]:
    times, plain = row.figures.time_ns, row.variant == PLAIN
    return [
        _spread(times),
        duration(times.minimum),
        "" if plain else duration(row.figures.added_ns.median),
        "" if plain else _ratio(row),
        "" if row.at_most is None else f"≤ {row.at_most:.2f} {'met' if row.met else 'MISSED'}",
    ]


def _spread(times: Spread) -> str:
    unit, size = _unit(times.median)
    lower, median, upper = (_scaled(ns, size) for ns in (times.lower, times.median, times.upper))
    return f"{median} {unit} [{lower}, {upper}]"


def _ratio(row: Row) -> str:
    ratio, n_rounds = row.ratio, row.figures.time_ns.n
    if ratio is None:
        return "none"
    left_out = f" {ratio.n} of {n_rounds}" if ratio.n < n_rounds else ""
    return f"{ratio.median:.3f} [{ratio.lower:.3f}, {ratio.upper:.3f}]{left_out}"
