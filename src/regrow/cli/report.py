"""What the demo shows: progress, one table, two sentences. Must never measure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from regrow.cli.gpt import PARAMETER_GROUPS
from regrow.cli.memory import Footprint

_CAPTION = """\
loss: of step {n_steps}, all digits of float32.
replays: runs of a block beyond its forwards, counted in the block itself.
step time: forward, backward and update, as a multiple of no checkpoint; the median of the ratios within each step.
MiB: allocated since the start of a step, summed from the profiler's allocation events; peak: at most, kept: after all \
forwards, before any backward."""


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a variant."""

    name: str
    loss: float
    replays: list[float]
    time_ratio: float
    footprint: Footprint | None


def progress(console: Console, losses: Iterable[float], n_steps: int) -> Iterator[float]:
    """Pass on what each step gives, and show how far it is: a bar on a terminal, a few lines elsewhere."""
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


def table(rows: Sequence[Row], n_steps: int) -> Table:
    """One row for each variant."""
    shown = Table(caption=_CAPTION.format(n_steps=n_steps), caption_justify="left")
    shown.add_column("variant", no_wrap=True)
    for heading in ("loss", "replays per block and micro-batch", "step time", "peak MiB", "kept MiB"):
        shown.add_column(heading, justify="right")
    for row in rows:
        peak, kept = ("-", "-") if row.footprint is None else _mebibytes(row.footprint)
        shown.add_row(row.name, f"{row.loss:.9g}", _span(row.replays), f"{row.time_ratio:.2f}", peak, kept)
    return shown


def meaning(plain: Row, native: Row, ours: Row) -> str:
    """What the table says, in two sentences."""
    return (
        "Where backward is cut into dx and dw, torch's checkpoint replays a block for dx and again for each of its "
        f"{PARAMETER_GROUPS} groups of parameters in dw, {_times(native.replays)} in all, and holds what a "
        f"replay brings back until it is read: {_cost(native, plain)}. "
        f"regrow replays it {_times(ours.replays)} for both: {_cost(ours, plain)}, with every loss and the last step's "
        "gradients equal to those of no checkpoint, bit for bit."
    )


def _bar(console: Console, losses: Iterable[float], n_steps: int) -> Iterator[float]:
    loss_column = TextColumn("loss {task.fields[loss]:.3f}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), loss_column, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("training", total=n_steps, loss=float("nan"))
        for loss in losses:
            shown.update(task, advance=1, loss=loss)
            yield loss


def _lines(console: Console, losses: Iterable[float], n_steps: int) -> Iterator[float]:
    for step, loss in enumerate(losses, 1):
        if 4 * step // n_steps > 4 * (step - 1) // n_steps:
            console.print(f"step {step} of {n_steps}, loss {loss:.3f}")
        yield loss


def _cost(row: Row, plain: Row) -> str:
    time = f"{row.time_ratio:.2f} times the step time of no checkpoint"
    if row.footprint is None or plain.footprint is None:
        return time
    return f"{time} and {row.footprint.peak_bytes / plain.footprint.peak_bytes:.2f} of its peak"


def _times(values: list[float]) -> str:
    count = _span(values)
    return "once" if count == "1" else f"{count} times"


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _mebibytes(footprint: Footprint) -> tuple[str, str]:
    return f"{footprint.peak_bytes / 2**20:.1f}", f"{footprint.retained_bytes / 2**20:.1f}"
