"""What surrounds a replay, and what is checked before and after it. MindSpore enters and leaves it; it makes no replay.

MindSpore enters one context around the function of every replay, lazy or fired. It leaves it by the function's return,
by its own early stop, or by an error; only the last leaves a replay half done, which MindSpore does not undo.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from weakref import ref

from regrow._core import replaying
from regrow._core.lifecycle import Replay
from regrow.platform._mindspore import _compat, randomness, records, sessions
from regrow.platform._mindspore.faults import ReplayMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regrow.platform._mindspore.frames import Frame
    from regrow.platform._mindspore.randomness import RandomState

# What MindSpore says when a replay saves more than forward. It has no class of its own.
_SAVED_MORE = "non-determinism"


class Surroundings:
    """The context that MindSpore enters around every replay of one call.

    Memory: holds the state of the random generators that forward began with.
    """

    def __init__(self, frame: Frame, state: RandomState | None) -> None:
        self._frame = frame
        self._state = state
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        try:
            in_session = sessions.adopt(self._frame)
            with ExitStack() as stack:
                if self._state is not None:
                    stack.enter_context(randomness.repeated(self._state))
                stack.enter_context(_marked(self._frame))
                if not in_session and _compat.backward_id() != -1:
                    self._end_with_backward()
                self._entered.append(stack.pop_all())
        except BaseException:
            _abandon(self._frame)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._entered.pop().close()
        if error is not None and not isinstance(error, _compat.Stop):
            mismatch = self._saved_more(error)
            _abandon(self._frame)
            if mismatch is not None:
                raise mismatch from error
        elif error is None:
            self._check_count()

    def _saved_more(self, error: BaseException) -> ReplayMismatchError | None:
        record = self._frame.record()
        if record is None or not isinstance(error, RuntimeError) or _SAVED_MORE not in str(error):
            return None
        forward = records.count(record)
        return ReplayMismatchError(self._frame.label, forward, forward + 1)

    def _check_count(self) -> None:
        record = self._frame.record()
        if record is None:  # forward still runs, and backward runs inside it
            return
        forward = records.count(record)
        for key in records.unfinished(record):
            replay = records.come_to(record, key)
            if replay < forward:
                _abandon(self._frame)
                raise ReplayMismatchError(self._frame.label, forward, replay)

    def _end_with_backward(self) -> None:
        """What a plain backward brings back and does not read goes when it ends. An error leaves it to the graph."""
        frame, key = ref(self._frame), _compat.backward_id()

        def forget() -> None:
            alive = frame()
            record = None if alive is None else alive.record()
            if record is not None:
                records.forget(record, key)

        _compat.at_backward_end(forget)


@contextmanager
def _marked(frame: Frame) -> Iterator[None]:
    """This thread runs a replay: `regrow.is_recomputing` says so, and calls are not collected."""
    here = replaying.thread.here
    before = here.replay
    here.replay = Replay(frame.label, frame, scheduled=False, outer=before)
    try:
        yield
    finally:
        here.replay = before


def runs_again(frame: Frame) -> bool:
    """Whether the function of this call runs for a replay here, rather than for forward."""
    replay = replaying.thread.here.replay
    return replay is not None and replay.owner is frame


def _abandon(frame: Frame) -> None:
    """Undo what MindSpore leaves of a replay that raised: its count, its values, its open graph."""
    record = frame.record()
    if record is not None:
        for key in records.unfinished(record):
            records.forget(record, key)
    _compat.end_empty_graph()
