"""Frame: one checkpointed call on MindSpore, beside MindSpore's own record of it. Must never hold a tensor.

Who holds whom, so that no cycle is left to the garbage collector:

    graph --> MindSpore's record --> frame --> session (while bound)
    handle, session  - - weak - - > frame  - - weak - - > MindSpore's record
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from regrow import errors
from regrow.platform._mindspore import records

if TYPE_CHECKING:
    from regrow.platform._mindspore.sessions import Session


class Frame:
    """One checkpointed call.

    Attributes:
        label: the function.
        bound: the session the call belongs to, from prefire or creation until clear.
        record: MindSpore's record of the call; None before forward has returned, and when its graph has died.
        lock: held while the call is prefired.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.bound: Session | None = None
        self.record: Callable[[], Any] = lambda: None
        self.complete = False
        self.lock = threading.RLock()

    def finish(self, record: Any) -> None:
        """Forward has returned."""
        self.record = weakref.ref(record)
        self.complete = True


class Handle:
    """A checkpointed call as a scheduler sees it: opaque.

    Memory: keeps neither the call nor any tensor alive.
    """

    __slots__ = ("__weakref__", "_frame", "_label", "_saved_nothing")

    def __init__(self, frame: Frame) -> None:
        self._frame = weakref.ref(frame)
        self._label = frame.label
        # Its backward needs no saved tensor: there will never be anything to replay, and the frame dies at once.
        self._saved_nothing = False

    def __repr__(self) -> str:
        return f"<handle of {self._label}>"


def alive(handle: Handle) -> tuple[Frame, Any]:
    """The frame behind a handle, and its record; RuntimeError if its graph has died or its forward still runs."""
    frame = handle._frame()
    if frame is not None and not frame.complete:
        raise RuntimeError(errors.unfinished_forward(frame.label))
    record = None if frame is None else frame.record()
    if frame is None or record is None or records.is_dead(record):
        raise RuntimeError(errors.released_frame(handle._label))
    return frame, record
