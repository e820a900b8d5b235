"""Returned: what is noted of a call when its forward returns, and the function as replays have it. Once per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regrow._core.closures import as_then, closure_of, still_plain
from regrow._core.frame import Frame
from regrow._core.regions import check_after_forward


def note(frame: Frame) -> None:
    """Forward has returned: note what it changed. From now on the call can be replayed."""
    frame.around = None
    if frame.regions is not None:
        check_after_forward(frame)
    frame.inputs.check_after_forward()
    if frame.state is not None:
        frame.state.after_forward()
    if frame.cells is not None and not (frame.state is None and still_plain(frame.function, frame.cells)):
        frame.closure = closure_of(frame.function, frame.cells, () if frame.state is None else frame.state.own)
        frame.cells = None
    frame.complete = True


def function_then(frame: Frame) -> Callable[..., Any]:
    """The function, over variables as they were when forward returned; in the middle of forward, as they are."""
    if frame.closure is not None:
        then: Callable[..., Any] = frame.closure.as_then()
        return then
    if frame.cells is not None and frame.complete:
        return as_then(frame.function, frame.cells)  # type: ignore[no-any-return]
    return frame.function
