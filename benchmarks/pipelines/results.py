"""Rows of results as lines of JSON, and what may be missed of them. Must never measure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))  # the other benchmarks, which know the machine

from report import Machine

__all__ = ["Machine", "Row", "Target", "chosen", "console", "measured", "table", "write_json"]

Row = dict[str, Any]
WIDTH = 140  # of a table, where no terminal says its own


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure may be, or has to be."""

    what: str
    value: float | None  # None: it was not measured in this run
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether it is met; None if it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def describe(self) -> str:
        """One line for a reader."""
        sign = "≥" if self.at_least else "≤"
        return f"{self.what}: {self.value:.3f} {sign} {self.limit:.2f} {'met' if self.met else 'MISSED'}"


def measured(targets: Iterable[Target]) -> list[Target]:
    """Those that this run says something about."""
    return [target for target in targets if target.value is not None]


def write_json(path: Path, rows: Iterable[Row], machine: Machine) -> None:
    """Write a line for each row, which ends with where it was measured."""
    path.write_text("".join(f"{json.dumps({**row, **asdict(machine)})}\n" for row in rows), encoding="utf-8")


def console() -> Console:
    """Where tables go."""
    return Console() if Console().is_terminal else Console(width=WIDTH)


def table(title: str, headings: list[str], rows: Iterable[list[str] | None]) -> Table:
    """A table whose first two columns are words and the others figures; None begins a section."""
    shown = Table(title=title)
    for place, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if place > 1 else "left", no_wrap=True)
    for row in rows:
        if row is None:
            shown.add_section()
        else:
            shown.add_row(*row)
    return shown


def chosen(wanted: str | None, known: Iterable[str], option: str) -> list[str]:
    """The names in a list with commas, in the known order; all if there is none.

    Raises:
        SystemExit: a name is not known.
    """
    names = list(known)
    picked = names if wanted is None else [name.strip() for name in wanted.split(",")]
    if unknown := [name for name in picked if name not in names]:
        raise SystemExit(f"{option}: no {', '.join(map(repr, unknown))} among {', '.join(names)}.")
    return [name for name in names if name in picked]
