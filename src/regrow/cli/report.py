"""The figures as one table, and what its words mean. Must never measure, and never cut a number short."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from regrow.cli.figures import FEWEST_TIMED_STEPS, Row

_WIDE = 90  # columns that a row for each variant takes
_MANY = 3  # values that are told by their span

_CAPTION = """\
loss: of step {n_steps}, all digits of float32.
replays: runs of a block beyond its forwards, counted in the block itself, per micro-batch.
step time: {step_time}
idle: {idle}
MiB: allocated on the rank that holds most since the start of a step, summed from the profiler's allocation events; \
peak: at most, kept: when the rank's first backward begins."""
_RATIO = "forward, backward and update, as a multiple of no checkpoint; the median of the ratios within each step."
_SECONDS = "forward, backward and update; the median of the steps."
_UNTIMED = f"- for fewer than {FEWEST_TIMED_STEPS} steps, which do not tell."
_IDLE = "the part of a step in which a rank computes nothing and waits for others, by rank; the median of the steps."


def table(rows: Sequence[Row], width: int) -> Table:
    """The figures.

    Args:
        rows: the variants.
        width: columns of the terminal. Where it is narrow, variants stand side by side, so that numbers stay whole.
    """
    return _by_variant(rows) if width >= _WIDE else _by_measure(rows)


def caption(rows: Sequence[Row], n_steps: int) -> str:
    """What the words of the table mean, a line each."""
    last = rows[-1]
    timed = _SECONDS if last.time_ratio is None else _RATIO
    step_time = _UNTIMED if last.step_s is None else timed
    return _CAPTION.format(n_steps=n_steps, step_time=step_time, idle=_IDLE if last.idle else "- is not told.")


def span(values: Sequence[float]) -> str:
    """All values in a word or three: `7`, or `1 to 7`."""
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def percents(values: Sequence[float]) -> str:
    """`31%`, `31%, 28%`, or `9% to 31%` where they are many; `-` where there are none."""
    shown = [f"{100 * value:.0f}%" for value in values]
    if len(shown) >= _MANY:
        return f"{100 * min(values):.0f}% to {100 * max(values):.0f}%"
    return ", ".join(shown) or "-"


def _by_variant(rows: Sequence[Row]) -> Table:
    shown = Table()
    shown.add_column("variant", no_wrap=True)
    for heading in ("loss", "replays per block", "step time", "idle", "peak MiB", "kept MiB"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(row.name, *_figures(row))
    return shown


def _by_measure(rows: Sequence[Row]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column("")
    for row in rows:
        shown.add_column(row.name, justify="right", overflow="fold")
    headings = ("loss", "replays", "step time", "idle", "peak MiB", "kept MiB")
    for line in zip(headings, *(_figures(row) for row in rows), strict=True):
        shown.add_row(*line)
    return shown


def _figures(row: Row) -> tuple[str, ...]:
    peak, kept = "-", "-"
    if row.footprint is not None:
        peak, kept = (f"{n / 2**20:.1f}" for n in (row.footprint.peak_bytes, row.footprint.retained_bytes))
    return (f"{row.loss:.9g}", span(row.replays), _step_time(row), percents(row.idle), peak, kept)


def _step_time(row: Row) -> str:
    if row.time_ratio is not None:
        return f"{row.time_ratio:.2f}"
    return "-" if row.step_s is None else f"{1000 * row.step_s:.0f} ms"
