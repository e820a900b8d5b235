"""How far the demo is: a bar on a terminal, a few lines elsewhere. Must never measure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_WIDEST_BAR = 40
_BESIDE_BAR = 48  # columns


def progress(console: Console, losses: Iterable[float], n_steps: int) -> Iterator[float]:
    """Pass on what each step gives, and show how far it is."""
    return (_bar if sys.stdout.isatty() else _lines)(console, losses, n_steps)


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """A context that says what takes so long."""
    if sys.stdout.isatty():
        with console.status(what):
            yield
    else:
        console.print(what)
        yield


def _bar(console: Console, losses: Iterable[float], n_steps: int) -> Iterator[float]:
    columns = (
        BarColumn(bar_width=max(4, min(_WIDEST_BAR, console.width - _BESIDE_BAR))),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("training", total=n_steps, loss="")
        for loss in losses:
            shown.update(task, advance=1, loss=f"loss {loss:.3f}")
            yield loss


def _lines(console: Console, losses: Iterable[float], n_steps: int) -> Iterator[float]:
    for step, loss in enumerate(losses, 1):
        if 4 * step // n_steps > 4 * (step - 1) // n_steps:
            console.print(f"step {step} of {n_steps}, loss {loss:.3f}")
        yield loss
