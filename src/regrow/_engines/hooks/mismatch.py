"""Mismatch: the replay saved other tensors than forward. Compares in full only after a quick comparison failed."""

from __future__ import annotations

from collections.abc import Sequence

from regrow._core import compat
from regrow._core.faults import ReplayMismatchError
from regrow._engines.hooks.oplog import OperatorLog, parting
from regrow._engines.hooks.slots import Look, describe

Difference = tuple[int, Look, Look]

_CAUSES = (
    "Does the function branch on state that changed since forward (a global, a counter, a training flag), "
    "use data-dependent shapes, or draw random numbers from a generator that is not restored?"
)


def same_but_for_ragged(forward: Look, replay: Look) -> bool:
    """Whether two saved tensors look alike."""
    return forward[1:] == replay[1:] and compat.same_shape(forward[0], replay[0])


def report(
    label: str,
    *,
    forward: int,
    replay: int,
    differences: Sequence[Difference],
    logs: tuple[OperatorLog, OperatorLog] | None,
) -> ReplayMismatchError:
    """The error for a replay that differs: counts, the first differences, the usual causes, the logs if kept."""
    lines = []
    if replay != forward:
        lines.append(f"{label}: forward saved {forward} tensors, the replay saved {_or_more(replay, forward)}.")
    else:
        lines.append(f"{label}: {len(differences)} of {forward} tensors saved by the replay differ from forward's.")
    for index, ours, theirs in differences[:3]:
        lines.append(f"Saved tensor {index}: forward {describe(ours)}, replay {describe(theirs)}.")
    if len(differences) > 3:
        lines.append(f"{len(differences) - 3} more differ.")
    lines.append(_CAUSES)
    if logs is None:
        lines.append(
            "Run once with checkpoint(..., debug=True) to list the operators of both runs and where they part."
        )
    else:
        lines.append(parting(*logs))
    return ReplayMismatchError(
        "\n".join(lines),
        label=label,
        forward=forward,
        replay=replay,
        indices=tuple(index for index, _, _ in differences),
    )


def _or_more(replay: int, forward: int) -> str:
    return f"{replay} or more" if replay > forward else str(replay)
