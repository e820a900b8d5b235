"""Recording: events of this process, kept as numbers and words. Must never keep what they tell of alive."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

from regrow._core import events
from regrow._core.events import Event
from regrow.trace.timeline import Timeline


def record(path: str | os.PathLike[str] | None = None, *, rank: int | None = None, limit: int = 200_000) -> Recorder:
    """A context that records what is replayed and what pipeline stages do, from when it is entered until it is left.

    ::

        with regrow.trace.record("run.json"):
            schedule.step(x, target=y)

    The file opens in Perfetto (ui.perfetto.dev) and in chrome://tracing; ``regrow trace show run.json`` draws it. On
    several ranks each writes a file of its own, and ``show`` takes them all. While it records, replays and stages are
    ranges for ``torch.profiler`` as well, named after the module.

    Args:
        path: where to write when the context is left without an exception; None: nowhere, see `Recorder.recording`.
        rank: which lane it is; None asks ``torch.distributed``.
        limit: of how many events the youngest are kept.

    Returns:
        The recorder, to be entered as a context.

    Raises:
        ValueError: ``limit`` is less than 1, or the folder of ``path`` does not exist.

    Memory: some 200 bytes for each event; a few events per checkpointed call. It keeps no tensor and no call alive.

    Threads: hears of every thread of the process.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit must be a number of at least 1, got {limit!r}.")
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"path: the folder {Path(path).absolute().parent} does not exist. Make it, or name another.")
    return Recorder(None if path is None else Path(path), _rank() if rank is None else rank, limit)


class Recorder:
    """What `record` returns.

    Attributes:
        rank: which lane it is.
    """

    def __init__(self, path: Path | None, rank: int, limit: int) -> None:
        self.rank = rank
        self._path = path
        self._events: deque[Event] = deque(maxlen=limit)

    def __enter__(self) -> Recorder:
        """Record from now on."""
        events.listen(self._events.append)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Record no longer, and write the file."""
        events.leave(self._events.append)
        if self._path is not None and error is None:
            self._path.write_text(Timeline.of([self.recording()]).to_json(), encoding="utf-8")

    def recording(self) -> dict[str, Any]:
        """What was recorded, as lists, numbers and words: to be sent to another rank, or kept."""
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            # From this process's clock to that of the calendar, for ranks on other machines.
            "epoch_ns": time.time_ns() - time.perf_counter_ns(),
            "events": [[type(event).__name__, *event] for event in self._events],
        }


def _rank() -> int:
    import torch.distributed as dist  # noqa: PLC0415

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
