"""The support matrix: what was found, kept per torch version in docs/support/, and the page that is made of it.

A cell is compared with the committed one the moment a test reports it, or written, with REGROW_WRITE_SUPPORT=1.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.matrix import REENTRANT, Cell

DOCS = Path(__file__).parents[2] / "docs"
PAGE, DATA = DOCS / "support.md", DOCS / "support"
VERSION = ".".join(torch.__version__.split(".")[:2])
WRITING = os.environ.get("REGROW_WRITE_SUPPORT") == "1"
STALE = "run `make support` and commit docs/support.md and docs/support/"

Rows = Mapping[str, str]  # what a row says, and the table it stands in
Found = dict[str, Any]

HEAD = """\
# What works

Each cell is what a test found: a program ran once without a checkpoint and once through the engine.

- `works`: the same values and gradients, bit for bit (across ranks, up to the order of adding up), and as many replays
  as the last column says, where they can be counted. Replays are runs of the functions beyond those without a
  checkpoint; after a slash stand those with `use_reentrant=True`, if they differ.
- `refused`: an error was raised. Its class and its first sentence are in the note; it is regrow's own unless the note
  says that it is torch's.
- `n.a.`: the feature has no meaning there, and the note says why.

A wrong gradient, or another number of replays, is no cell: it fails the tests.

The files in [support](support) are what the tests wrote, one for each version of torch; where versions differ, the cell
says so. `make support` runs the tests and writes this page ([how](../CONTRIBUTING.md#tests)).
"""


class Support:
    """Takes cells from tests, and compares them with what is committed, or writes them."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Cell]] = {}
        self.committed = read().get(VERSION)

    def __call__(self, row: str, engine: str, cell: Cell) -> None:
        """A test has proved a cell."""
        if WRITING:
            was = self.found.setdefault(row, {}).setdefault(engine, cell)
            assert was == cell, f"{row}, {engine}: two tests found different cells: {was} and {cell}"
        elif self.committed is not None:
            was = self.committed["features"].get(row, {}).get(engine)
            assert cell == was, f"{row}, {engine}: found {cell}, docs/support has {was}; {STALE}"

    def save(self, rows: Rows) -> None:
        """Write what was found over what there was, and the page."""
        features = {**(self.committed or {"features": {}})["features"], **self.found}
        ordered = {row: features[row] for row in rows if row in features}
        version, python = torch.__version__.partition("+")[0], platform.python_version()
        DATA.mkdir(exist_ok=True)
        lines = ",\n".join(
            f"{json.dumps(row)}: {json.dumps(cells)}" for row, cells in ordered.items()
        )  # to be compared
        text = f'{{"torch": "{version}", "python": "{python}", "features": {{\n{lines}\n}}}}\n'
        (DATA / f"torch-{VERSION}.json").write_text(text, encoding="utf-8")
        PAGE.write_text(rendered(rows, read()), encoding="utf-8")


def works(replays: int, but: str = "") -> Cell:
    """The cell of a feature that a test has asserted, with the replays it counted, and what it asserted beside."""
    return {"is": "works", **({"but": but} if but else {}), "replays": replays}


def read() -> dict[str, Found]:
    """What is committed, by version."""
    files = sorted(DATA.glob("torch-*.json"))
    return {path.stem.partition("-")[2]: json.loads(path.read_text(encoding="utf-8")) for path in files}


def rendered(rows: Rows, versions: Mapping[str, Found]) -> str:
    """The page."""
    ran = " and ".join(f"torch {found['torch']} (Python {found['python']})" for found in versions.values())
    parts = [HEAD, f"Run on {ran}, on CPU, and on gloo between ranks.\nNothing here was run on a GPU.\n"]
    notes: dict[str, int] = {}
    for group in dict.fromkeys(rows.values()):
        parts.append(f"## {group}\n")
        table = ["| | `use_reentrant=False` | `use_reentrant=True` | replays |", "| --- | --- | --- | --- |"]
        for row in (row for row, its in rows.items() if its == group):
            by_engine = [
                {version: found["features"].get(row, {}).get(engine) for version, found in versions.items()}
                for engine in REENTRANT
            ]
            cells = [_merged(cells, notes) for cells in by_engine]
            table.append(f"| {row} | {' | '.join(cells)} | {_replays(by_engine)} |")
        parts.append("\n".join(table) + "\n")
    parts.append("## Notes\n")
    parts.append("\n".join(f"{number}. {note}" for note, number in notes.items()) + "\n")
    return "\n".join(parts)


def _merged(cells: Mapping[str, Cell | None], notes: dict[str, int]) -> str:
    shown = {version: _shown(cell, notes) for version, cell in cells.items()}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return "; ".join(f"{version}: {text}" for version, text in shown.items())


def _shown(cell: Cell | None, notes: dict[str, int]) -> str:
    if cell is None:
        return "not run"
    note = {"works": cell.get("but"), "refused": _said(cell), "n.a.": cell.get("why")}[cell["is"]]
    return cell["is"] if note is None else f"{cell['is']} [{notes.setdefault(note, len(notes) + 1)}](#notes)"


def _said(cell: Cell) -> str:
    whose = "" if cell.get("by") == "regrow" else "torch: "
    return f"{whose}`{cell.get('says', '').replace('`', '')}`"


def _replays(by_engine: list[dict[str, Cell | None]]) -> str:
    counts = [
        {str(cell["replays"]) for cell in cells.values() if cell is not None and "replays" in cell}
        for cells in by_engine
    ]
    shown = [", ".join(sorted(count)) for count in counts if count]
    return " / ".join(dict.fromkeys(shown)) if shown else ""
