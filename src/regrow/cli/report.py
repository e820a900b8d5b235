"""The demo's figures: one table, and what its words mean. Must never measure, and never cut a number short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from regrow.cli.compare import FEWEST_TIMED_STEPS
from regrow.cli.memory import Footprint

_WIDE = 80  # columns that a row for each variant takes

_CAPTION = """\
loss: of step {n_steps}, all digits of float32.
replays: runs of a block beyond its forwards, counted in the block itself.
step time: {step_time}
MiB: allocated since the start of a step, summed from the profiler's allocation events; peak: at most, kept: after all \
forwards, before any backward."""
_TIMED = "forward, backward and update, as a multiple of no checkpoint; the median of the ratios within each step."
_UNTIMED = f"- for fewer than {FEWEST_TIMED_STEPS} steps, which do not tell."


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a variant; None is what the run does not tell."""

    name: str
    loss: float
    replays: list[float]
    time_ratio: float | None
    footprint: Footprint | None


def table(rows: Sequence[Row], width: int) -> Table:
    """The figures.

    Args:
        rows: the variants.
        width: columns of the terminal. Where it is narrow, variants stand side by side, so that numbers stay whole.
    """
    return _by_variant(rows) if width >= _WIDE else _by_measure(rows)


def caption(rows: Sequence[Row], n_steps: int) -> str:
    """What the words of the table mean, a line each."""
    timed = all(row.time_ratio is not None for row in rows)
    step_time = _TIMED if timed else _UNTIMED
    return _CAPTION.format(n_steps=n_steps, step_time=step_time)


def span(values: list[float]) -> str:
    """All values in a word or three: `7`, or `6 to 7`."""
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _by_variant(rows: Sequence[Row]) -> Table:
    shown = Table()
    shown.add_column("variant", no_wrap=True)
    for heading in ("loss", "replays per block and micro-batch", "step time", "peak MiB", "kept MiB"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(row.name, *_figures(row))
    return shown


def _by_measure(rows: Sequence[Row]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column("")
    for row in rows:
        shown.add_column(row.name, justify="right", overflow="fold")
    headings = ("loss", "replays", "step time", "peak MiB", "kept MiB")
    for line in zip(headings, *(_figures(row) for row in rows), strict=True):
        shown.add_row(*line)
    return shown


def _figures(row: Row) -> tuple[str, ...]:
    step_time = "-" if row.time_ratio is None else f"{row.time_ratio:.2f}"
    peak, kept = ("-", "-") if row.footprint is None else _mebibytes(row.footprint)
    return (f"{row.loss:.9g}", span(row.replays), step_time, peak, kept)


def _mebibytes(footprint: Footprint) -> tuple[str, str]:
    return f"{footprint.peak_bytes / 2**20:.1f}", f"{footprint.retained_bytes / 2**20:.1f}"
