"""One micro-batch on one stage: the life of its replays, from forward to clear. Is the id of its own session.

forward > (prefire) > dx, retains > what dw will not read is let go > dw, lets go > clear
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from regrow._core import scope
from regrow._core.frame import Frame, Handle
from regrow._core.lifecycle import Reason, Replay
from regrow._core.scope import Scope
from regrow.pipelining.sites import Sites, Watch
from regrow.scheduling import (
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)


class MicroBatch:
    """The checkpointed calls of one micro-batch on one stage.

    Memory: keeps no call alive. Their replays are held from prefire, or from the first read, until `clear`.
    """

    __slots__ = ("_fired", "_handles", "_label", "_sites", "_trimmed", "_watches")

    def __init__(self, label: str, sites: Sites) -> None:
        self._label = label
        self._sites = sites
        self._handles: list[Handle] = []
        self._fired = False
        self._watches: dict[int, Watch] = {}
        self._trimmed: set[int] = set()

    def __repr__(self) -> str:
        return f"<{self._label}>"

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Forward runs inside: its calls belong to this session, and reentrant ones have halves that backward finds."""
        with (
            recompute_session_ctx(self, retain_on_unpack=True),
            scope.opened(Scope((), automatic=True)),
            recompute_handle_collector_ctx() as handles,
        ):
            yield
        self._handles = handles

    def prefire(self, limit: float | None, *, carrier: bool) -> None:
        """Replay now, deepest call first, which backward reads first. A second time it does nothing.

        Args:
            carrier: whether to replay inside a backward of its own, as FSDP2 wants it.
            limit: bytes that may be held; None for one call. A site that was never measured counts as the largest that
                was, and as nothing if none was.
        """
        if self._fired or limit == 0:
            return
        self._fired = True
        held = largest = 0
        for index, frame in reversed(self._alive()):
            known = self._sites.bytes_of(index, frame)
            if limit is not None and held + (largest if known is None else known) > limit:
                return
            recompute_handle(self._handles[index], self, carrier=carrier)
            if limit is None:
                return
            taken = self._sites.measure(index, frame, frame.bound) if known is None else known
            held, largest = held + taken, max(largest, taken)

    @contextmanager
    def full(self) -> Iterator[None]:
        """The whole backward runs inside."""
        with self._reading(retain=False):
            yield
        self.clear()

    @contextmanager
    def dx(self, retention: str) -> Iterator[None]:
        """The first half runs inside; afterwards what dw does not read is let go, or watched, to learn what it reads.

        Args:
            retention: "all", "needed" or "none".
        """
        with self._reading(retain=True):
            yield
        for index, frame in () if retention == "all" else self._alive():
            unread = self._sites.unread(index, frame) if frame.learns else frozenset()
            if retention == "none":
                frame.release(frame.bound, Reason.ENDED)
            elif unread is None:
                self._watches[index] = frame.watch(frame.bound)
            else:
                frame.trim(frame.bound, unread)
                if frame.learns:
                    self._trimmed.add(index)

    @contextmanager
    def dw(self) -> Iterator[None]:
        """The second half runs inside; afterwards nothing is left."""
        alive = self._alive()  # until what was read has been noted
        before = {index: _replay(frame) for index, frame in alive}
        with self._reading(retain=False):
            yield
        for index, frame in alive:
            if index in self._watches:
                self._sites.learn(index, frame, self._watches[index]())
            elif index in self._trimmed and _replay(frame) is not before[index]:
                self._sites.missed(index, frame)
        self.clear()

    def clear(self) -> None:
        """Nothing is held any more; again it does nothing."""
        clear_recompute_session(self)
        self._watches.clear()
        self._handles = []

    @contextmanager
    def _reading(self, *, retain: bool) -> Iterator[None]:
        """Backward reads what was replayed, or has it replayed once. On an exception everything is let go."""
        self._fired = True
        try:
            with recompute_session_ctx(self, retain_on_unpack=retain):
                yield
        except BaseException:
            self.clear()
            raise

    def _alive(self) -> list[tuple[int, Frame]]:
        frames = ((index, handle._frame()) for index, handle in enumerate(self._handles))
        return [(index, frame) for index, frame in frames if frame is not None]


def _replay(frame: Frame) -> Replay | None:
    return frame.replays.get(frame.bound)
