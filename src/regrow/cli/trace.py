"""`regrow trace`: look at what was recorded. Must never import torch or matplotlib before it runs: help is for now.

Exit status: 0 drawn, 2 a file cannot be read, written, or is no recording.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regrow.cli.loading import load

trace = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look at what was recorded.")


@trace.callback()
def commands() -> None:
    """Look at what `regrow train --trace` or `regrow.trace.record` has recorded.

    The files open in Perfetto (ui.perfetto.dev) as well.
    """


@trace.command(short_help="Draw a timeline and what replays hold.")
def show(
    files: Annotated[list[Path], typer.Argument(help="What was recorded; one file for each rank, or one for all.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The picture: .png, .svg or .pdf.", show_default="the first file's name, with .png"),
    ] = None,
) -> None:
    """Draw what every rank did when, and what replays held.

    A table says for each rank how long its steps took, how much of that it was idle, how long its replays took, and how
    much of them was hidden where the rank would have waited.
    """
    raise typer.Exit(load("regrow.cli.showing").show(files, out))
