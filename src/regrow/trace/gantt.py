"""Pictures of timelines through matplotlib: a lane for each rank, and below it what replays hold. Must never measure.

Colours are those of Okabe and Ito, which colour-blind people tell apart; replays are hatched, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrow.trace.timeline import Figures, Lane, Slice, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Kind: what the legend says, colour, hatch. In the order in which they are drawn.
_LOOKS = {
    "wait": ("wait (bubble)", "#f2f2f2", ""),
    "F": ("F  forward", "#56b4e9", ""),
    "B": ("B  backward", "#e69f00", ""),
    "dx": ("dx  gradients of activations", "#f0e442", ""),
    "dw": ("dw  gradients of parameters", "#009e73", ""),
    "R lazy": ("R  replay, when backward asked", "#d55e00", "////"),
    "R prefired": ("R  replay, prefired", "#cc79a7", "\\\\\\\\"),
}
_LINES = (("#000000", "-"), ("#0072b2", "--"), ("#d55e00", "-."), ("#009e73", ":"))
_WIDTH_IN = 13.0
_DPI = 130


def draw(timeline: Timeline, path: Path) -> None:
    """Draw a timeline.

    Args:
        timeline: what.
        path: where; its suffix says how: .png, .svg, .pdf.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib cannot write such a file, or nothing was recorded.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - of an extra

    if not any(lane.slices for lane in timeline.lanes):
        raise ValueError("nothing was recorded: no stage ran, and nothing was replayed.")
    lanes = timeline.lanes
    figure = Figure(figsize=(_WIDTH_IN, 2.9 + 0.75 * len(lanes)), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[0.75 * len(lanes), 1.1])
    scale, unit = _time_unit(max(each.ended_s for lane in lanes for each in lane.slices))
    seen = [kind for lane_at, lane in enumerate(lanes) for kind in _draw_lane(top, lane, lane_at, scale)]
    _label_lanes(top, timeline)
    _draw_held(bottom, lanes, scale)
    bottom.set_xlabel(f"time ({unit})")
    figure.suptitle(_title(timeline), x=0.01, ha="left", fontsize=11)
    _legend(figure, set(seen), _numbers(lanes))
    figure.savefig(path, dpi=_DPI)


def _draw_lane(axes: Axes, lane: Lane, at: int, scale: float) -> list[str]:
    plain = not lane.of("F", "B", "dx", "dw")
    drawn: list[str] = []
    for kind, (_, colour, hatch) in _LOOKS.items():
        slices = [each for each in lane.slices if _looks_like(each, plain=plain) == kind]
        if not slices:
            continue
        drawn.append(kind)
        low, height = (at - 0.4, 0.32 if kind == "R lazy" else 0.8)  # one that backward asked for lies within it
        bars = [(each.began_s * scale, each.length_s * scale) for each in slices]
        edge = "none" if kind == "wait" else "#333333"
        axes.broken_barh(bars, (low, height), facecolors=colour, edgecolors=edge, linewidth=0.5, hatch=hatch)
    _number(axes, lane, at, scale)
    return drawn


def _looks_like(each: Slice, *, plain: bool) -> str:
    if each.kind == "R":
        return "R prefired" if each.prefired else "R lazy"
    return "F" if each.kind == "call" and plain else each.kind


def _has_several(lane: Lane) -> bool:
    return len({each.stage for each in lane.slices if each.stage >= 0}) > 1


def _numbers(lanes: Sequence[Lane]) -> str:
    """What the numbers in the picture are."""
    if not any(each.stage >= 0 for lane in lanes for each in lane.slices):
        return ""
    return "numbers: stage · micro-batch" if any(map(_has_several, lanes)) else "numbers: micro-batch"


def _number(axes: Axes, lane: Lane, at: int, scale: float) -> None:
    """The micro-batch on what is wide enough; where a rank has several stages, the stage before it."""
    several = _has_several(lane)
    whole = max((each.ended_s for each in lane.slices), default=0.0)
    for each in lane.of("F", "B", "dx", "dw"):
        text = f"{each.stage}·{each.micro_batch}" if several else str(each.micro_batch)
        if each.length_s > whole * (0.010 + 0.005 * len(text)):
            centre = (each.began_s + each.ended_s) / 2 * scale
            axes.text(centre, at + 0.15, text, ha="center", va="center", fontsize=8)


def _label_lanes(axes: Axes, timeline: Timeline) -> None:
    lanes = timeline.lanes
    axes.set_yticks(range(len(lanes)), [_lane_name(timeline, lane) for lane in timeline.lanes])
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _lane_name(timeline: Timeline, lane: Lane) -> str:
    figures = timeline.figures(lane)
    return f"rank {lane.rank}\nidle {figures.idle:.0%}" if figures.step_s else f"rank {lane.rank}"


def _draw_held(axes: Axes, lanes: Sequence[Lane], scale: float) -> None:
    peak = max((n for lane in lanes for _, n in lane.held), default=0)
    divisor, unit = (1 << 20, "MiB") if peak >= 1 << 20 else (1 << 10, "KiB")
    end = max(each.ended_s for lane in lanes for each in lane.slices)
    for lane in lanes:
        colour, style = _LINES[lane.rank % len(_LINES)]
        points = [(0.0, 0), *lane.held]
        points.append((max(end, points[-1][0]), points[-1][1]))
        times, held = zip(*points, strict=True)
        axes.step(
            [at * scale for at in times],
            [n / divisor for n in held],
            where="post",
            color=colour,
            linestyle=style,
            linewidth=1.4,
            label=f"rank {lane.rank}",
        )
    axes.set_ylabel(f"held by\nreplays ({unit})")
    axes.set_ylim(0, 1.45 * max(peak / divisor, 0.1))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(loc="upper right", fontsize=8, frameon=True, ncols=4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure, seen: set[str], numbers: str) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415 - of an extra

    patches: list[Any] = [
        Patch(facecolor=colour, edgecolor="#333333", linewidth=0.5, hatch=hatch, label=name)
        for kind, (name, colour, hatch) in _LOOKS.items()
        if kind in seen
    ]
    figure.legend(
        handles=patches,
        title=numbers,
        title_fontsize=9,
        loc="outside lower center",
        ncols=4,
        fontsize=9,
        frameon=False,
    )


def _title(timeline: Timeline) -> str:
    return "\n".join(filter(None, (timeline.title, hidden(timeline))))


def hidden(timeline: Timeline) -> str:
    """How much of the replays was hidden, as a sentence; empty where nothing was replayed."""
    sums = [timeline.figures(lane) for lane in timeline.lanes]
    replay_s = sum(each.replay_s for each in sums)
    if not replay_s:
        return ""
    share = sum(each.hidden_s for each in sums) / replay_s
    return f"Replays took {replay_s * 1e3:.1f} ms on all ranks; {share:.0%} of it was hidden in waits."


def rows(timeline: Timeline) -> list[tuple[str, Figures]]:
    """The figures of each rank."""
    return [(f"rank {lane.rank}", timeline.figures(lane)) for lane in timeline.lanes]


def _time_unit(end_s: float) -> tuple[float, str]:
    return (1.0, "s") if end_s >= 10 else (1e3, "ms")
