"""Showing: recordings as a picture and a table. Must never record."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from regrow.cli.complaining import complain
from regrow.trace.gantt import draw, hidden, rows
from regrow.trace.timeline import Timeline

_COMMAND = "regrow trace show"


def show(files: Sequence[Path], out: Path | None) -> int:
    """Draw files, and print the figures.

    Args:
        files: what was recorded.
        out: the picture; None is the first file's name, with .png.

    Returns:
        The exit status: 2 where a file cannot be read, written, or is no recording.
    """
    timelines, faults = [], []
    for file in files:
        found = _read(file)
        if isinstance(found, str):
            faults.append(found)
        else:
            timelines.append(found)
    if faults:
        complain(_COMMAND, faults)
        return 2
    out = out or files[0].with_suffix(".png")
    try:
        timeline = Timeline.joined(timelines)
        draw(timeline, out)
    except (ValueError, OSError) as error:
        complain(_COMMAND, [f"{out} cannot be drawn: {error}"])
        return 2
    console = Console(file=sys.stdout, highlight=False, markup=False)
    console.print(_table(timeline))
    said = hidden(timeline)
    console.print(f"{said} The picture is {out}." if said else f"The picture is {out}.")
    return 0


def _read(file: Path) -> Timeline | str:
    """The timeline, or what is wrong."""
    try:
        return Timeline.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        return f"{file} cannot be read ({getattr(error, 'strerror', None) or 'it is no text'})."
    except ValueError as error:
        return f"{file} is {error}"


def _table(timeline: Timeline) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "steps", "idle", "replays", "hidden"):
        table.add_column(name, justify="right" if name else "left")
    for name, figures in rows(timeline):
        seconds = (figures.replay_s, figures.hidden_s)
        table.add_row(name, _ms(figures.step_s), f"{figures.idle:.0%}", *map(_ms, seconds))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
