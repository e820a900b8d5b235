"""What the demo's numbers say, in sentences. Must never claim what this run's numbers do not show."""

from __future__ import annotations

from regrow.cli.figures import Row
from regrow.cli.gpt import PARAMETER_GROUPS
from regrow.cli.memory import Footprint
from regrow.cli.report import percents, span


def meaning(plain: Row, native: Row, lazy: Row, prefired: Row) -> str:
    """The closing paragraph, for variants whose losses and gradients agree.

    Args:
        plain: no checkpoint, which the others are measured against.
        native: torch's checkpoint.
        lazy: regrow's, replayed when backward asks.
        prefired: regrow's, replayed where a rank would wait.
    """
    said = [_native(plain, native), _lazy(plain, lazy), _prefired(plain, lazy, prefired)]
    return " ".join([*said, *_reservations(plain, native, prefired), _agreement()])


def _native(plain: Row, native: Row) -> str:
    replays = f"Where backward is cut into dx and dw, torch's checkpoint replays a block {_times(native.replays)}"
    if max(native.replays) == 1 + PARAMETER_GROUPS:
        replays += f", once for dx and once for each of its {PARAMETER_GROUPS} groups of parameters in dw"
        if min(native.replays) == 1:
            replays += " (the first stage has no dx: once)"
    return f"{replays}{_cost(native, plain)}."


def _lazy(plain: Row, lazy: Row) -> str:
    once = " for both" if set(lazy.replays) == {1} else ""
    return f"regrow replays it {_times(lazy.replays)}{once}{_cost(lazy, plain)}."


def _prefired(plain: Row, lazy: Row, prefired: Row) -> str:
    kept = " (what would be replayed at once is kept instead)" if min(prefired.replays) < 1 else ""
    said = (
        f"With replays where a rank would wait, it runs them {_times(prefired.replays)}{kept}{_cost(prefired, plain)}."
    )
    if not (lazy.idle and prefired.idle):
        return said
    return (
        f"{said} Ranks are then idle for {percents(prefired.idle)} of a step, without that for {percents(lazy.idle)}."
    )


def _reservations(plain: Row, native: Row, ours: Row) -> list[str]:
    """What the numbers do not show, though a reader may expect it."""
    said = []
    if _peak(ours) >= _peak(plain) > 0:
        said.append("At this size regrow does not lower the peak: the model keeps too little to save.")
    if _peak(ours) >= _peak(native) > 0:
        said.append("Its peak is not below that of torch's checkpoint.")
    if ours.time_ratio is None or native.time_ratio is None:
        said.append("The run is too short to compare step times.")
    elif ours.time_ratio >= native.time_ratio:
        said.append("Its step is not faster than that of torch's checkpoint.")
    return said


def _agreement() -> str:
    return "On every rank, each loss and the last step's gradients equal those of no checkpoint, bit for bit."


def _cost(row: Row, plain: Row) -> str:
    costs = []
    if row.time_ratio is not None:
        costs.append(f"a step takes {row.time_ratio:.2f} times as long as with no checkpoint")
    if row.footprint is not None and plain.footprint is not None:
        costs.append(_peaks(row.footprint, plain.footprint))
    return f": {' and '.join(costs)}" if costs else ""


def _peaks(footprint: Footprint, plain: Footprint) -> str:
    percent = round(100 * footprint.peak_bytes / plain.peak_bytes) - 100
    if not percent:
        return "its peak is that of no checkpoint"
    return f"its peak is {abs(percent)}% {'above' if percent > 0 else 'below'} that of no checkpoint"


def _peak(row: Row) -> int:
    """The bytes, or 0 where nobody counted."""
    return row.footprint.peak_bytes if row.footprint else 0


def _times(values: list[float]) -> str:
    count = span(values)
    return "once" if count == "1" else f"{count} times"
