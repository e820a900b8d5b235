"""The operators of one execution, for ``debug=True``. Must never keep a tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regrow._core import replaying, trees
from regrow._engines.hooks.slots import describe, look

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


class OperatorLog(TorchDispatchMode):
    """A line per operator: its name, what it returned, and the line of user code that called it.

    Detaches are left out: checkpointing adds its own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self.places: list[str] = []
        self._here: object = None

    def __enter__(self) -> OperatorLog:
        """Note this thread's own execution, and not those of replays inside it."""
        self._here = replaying.place()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and note it."""
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default and replaying.place() == self._here:
            made = ", ".join(describe(look(t)) for t in trees.tensors_in(out))
            self.lines.append(f"{func} -> {made or 'no tensor'}")
            self.places.append(_user_line())
        return out


def parting(forward: OperatorLog, replay: OperatorLog) -> str:
    """Where two executions part, and both logs."""
    ours, theirs = forward.lines, replay.lines
    index = next((k for k, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if index is None:
        shorter = min(len(ours), len(theirs))
        index = shorter if len(theirs) > len(ours) else None
    parts = []
    if index is None:
        parts.append(f"The replay ran the first {len(theirs)} of forward's {len(ours)} operators, in the same order.")
    else:
        parts.append(f"First difference, operator {index}: forward {_at(forward, index)}; replay {_at(replay, index)}.")
    for title, log in (("forward", forward), ("replay", replay)):
        parts.append(f"Operators of the {title}:")
        parts += [f"  {k}: {_at(log, k)}" for k in range(len(log.lines))]
    return "\n".join(parts)


def _at(log: OperatorLog, index: int) -> str:
    return f"{log.lines[index]} at {log.places[index]}" if index < len(log.lines) else "nothing"


def _user_line() -> str:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_back is None:
            return "an unknown line"
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
