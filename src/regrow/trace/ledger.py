"""The ledger: what was replayed, how often, and what it held. Must never keep a tensor, a call or a session alive.

Events come from any thread, and in the midst of each other: a graph may die while one is being entered. So they are put
in a row, and whoever finds nobody at work enters them all.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import deque
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter_ns
from types import TracebackType
from typing import Any, TextIO

from regrow._core import events
from regrow._core.events import (
    Died,
    Event,
    Forward,
    Released,
    Replayed,
    SessionCleared,
    SessionDropped,
    SessionOpened,
)
from regrow.trace.account import Account
from regrow.trace.text import in_bytes, in_seconds, table

_log = logging.getLogger("regrow.trace")


@dataclass(slots=True)
class CallRow:
    """One checkpointed call.

    Attributes:
        label: the function, with its module path where known.
        index: which call of that label it is, from 0; in a pipeline or a loop over micro-batches, which micro-batch.
        alive: whether its graph is there.
        in_session: how many of its replays were for a session.
    """

    label: str
    index: int
    account: Account = field(default_factory=Account)
    alive: bool = True
    in_session: int = 0


@dataclass(slots=True)
class SessionRow:
    """One name of a session, which may have been used again and again.

    Attributes:
        opened: the line of user code that opened it last.
        cleared: whether it was cleared since it was used last.
    """

    name: str
    opened: str = "before the ledger"
    account: Account = field(default_factory=Account)
    cleared: bool = False
    dropped: bool = False


def ledger(*, keep: int = 10_000) -> Ledger:
    """A context that counts replays and what they hold, from when it is entered until it is left.

    ::

        with regrow.ledger() as l:
            train_step()
        l.summary()

    When a call was replayed more than once, or a session went away without being cleared, a warning says so through
    ``logging`` (``regrow.trace``): once per function, and once per line that opens sessions.

    Args:
        keep: of how many calls, and of how many sessions, rows are kept, the youngest; sums are of all.

    Returns:
        The ledger, to be entered as a context, any number of times; its figures add up.

    Raises:
        ValueError: ``keep`` is less than 1.

    Memory: a few hundred bytes for each row. It keeps no tensor, no call and no session alive. Bytes are those of
        storages, once per replay, that it alone keeps alive: not of inputs and parameters. A replay counts in full
        until it is released or its graph dies; where reads let values go, until any call is replayed next.

    Threads: hears of every thread of the process. Several ledgers may be open at once.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep must be a number of at least 1, got {keep!r}.")
    return Ledger(keep)


class Ledger:
    """What `ledger` returns.

    Attributes:
        total: the account of everything.
        warnings: what was said through ``logging``.
    """

    def __init__(self, keep: int) -> None:
        self.total = Account()
        self.warnings: list[str] = []
        self._keep = keep
        self._depth = 0
        self._calls: dict[int, CallRow] = {}
        self._labels: dict[str, Account] = {}
        self._sessions: dict[str, SessionRow] = {}
        # What each replay holds, by its number, and which accounts it stands in.
        self._held: dict[int, tuple[int, tuple[Account, ...]]] = {}
        self._said: set[tuple[str, str]] = set()
        self._queue: deque[Event] = deque()
        self._working = Lock()

    def __enter__(self) -> Ledger:
        """Listen from now on; entered again within itself, it goes on."""
        self._depth += 1
        if self._depth == 1:
            events.listen(self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Listen no longer; warn of what was found."""
        self._depth -= 1
        if self._depth:
            return
        events.leave(self._hear)
        self._work_off()
        for row in self._calls.values():
            self._warn_of_replays(row)
        for session in self._sessions.values():
            self._warn_of_drop(session)

    @property
    def calls(self) -> list[CallRow]:
        """A row for each call, in the order in which they were first heard of."""
        self._settle()
        return list(self._calls.values())

    @property
    def labels(self) -> dict[str, Account]:
        """The account of each function or module."""
        self._settle()
        return dict(self._labels)

    @property
    def sessions(self) -> list[SessionRow]:
        """A row for each name of a session."""
        self._settle()
        return list(self._sessions.values())

    def summary(self, file: TextIO | None = None) -> None:
        """Print a table: a line for each function, and their sum; sessions that hold something; warnings.

        Args:
            file: where to; None is ``sys.stdout``.
        """
        self._settle()
        rows = [_cells(label, account) for label, account in self._labels.items()]
        lines = [table(_HEAD, [*rows, _cells("all", self.total)])]
        holding = [row for row in self._sessions.values() if row.account.held_bytes]
        if holding:
            head = ("session holds now", "bytes", "peak", "replays", "opened at")
            lines += ["", table(head, [_session_cells(row) for row in holding])]
        lines += ["", *(f"warning: {warning}" for warning in self.warnings)] if self.warnings else []
        (file or sys.stdout).write("\n".join(lines) + "\n")

    def to_json(self) -> str:
        """Everything as JSON: ``total``, ``labels``, ``calls``, ``sessions``, ``warnings``; bytes and seconds."""
        self._settle()
        calls = (
            {"label": row.label, "index": row.index, "alive": row.alive, **row.account.figures()}
            for row in self._calls.values()
        )
        sessions = (
            {"session": row.name, "opened": row.opened, "cleared": row.cleared, **row.account.figures()}
            for row in self._sessions.values()
        )
        everything = {
            "version": 1,
            "total": self.total.figures(),
            "labels": {label: account.figures() for label, account in self._labels.items()},
            "calls": list(calls),
            "sessions": list(sessions),
            "warnings": self.warnings,
        }
        return json.dumps(everything, indent=1)

    def _hear(self, event: Event) -> None:
        self._queue.append(event)
        self._work_off()

    def _work_off(self) -> None:
        """Enter what is in the row. Whoever comes while another does, or in the midst of it, leaves it to that one."""
        while self._queue and self._working.acquire(blocking=False):
            try:
                while self._queue:
                    self._enter(self._queue.popleft())
            finally:
                self._working.release()

    def _settle(self) -> None:
        self._work_off()
        now = perf_counter_ns()
        for account in self._accounts():
            account.settle(now)

    def _accounts(self) -> list[Account]:
        rows: list[CallRow | SessionRow] = [*self._calls.values(), *self._sessions.values()]
        return [self.total, *self._labels.values(), *(row.account for row in rows)]

    def _enter(self, event: Event) -> None:
        match event:
            case Forward():
                self._forward(event)
            case Replayed():
                self._replayed(event)
            case Released():
                self._released(event)
            case Died():
                row = self._calls.get(event.call)
                if row is not None:
                    row.alive = False
                    self._warn_of_replays(row)
            case SessionOpened():
                session = self._session(event.session)
                self._warn_of_drop(session)
                session.opened, session.cleared, session.dropped = event.where, False, False
            case SessionCleared():
                self._session(event.session).cleared = True
            case SessionDropped():
                self._session(event.session).dropped = True

    def _forward(self, event: Forward) -> None:
        for account in self._of(event.call, event.label, event.session):
            account.forwards += 1
        if event.session is not None:
            self._session(event.session).cleared = False

    def _replayed(self, event: Replayed) -> None:
        for replay, left_bytes in event.shrunk:
            self._hold(replay, left_bytes, event.ended_ns)
        accounts = self._of(event.call, event.label, event.session)
        for account in accounts:
            account.replays += 1
            account.failed += event.failed
            account.prefired += event.prefired
            account.lazy += not event.prefired
            account.replay_s += (event.ended_ns - event.began_ns) / 1e9
        if event.session is not None:
            self._calls[event.call].in_session += 1
        if event.held_bytes:
            self._held[event.replay] = 0, accounts
            self._hold(event.replay, event.held_bytes, event.ended_ns)

    def _released(self, event: Released) -> None:
        self._hold(event.replay, 0, event.at_ns)
        self._held.pop(event.replay, None)
        wasted = event.prefired and not event.passes and event.reason != "failed"
        for account in self._of(event.call, event.label, event.session):
            account.late += event.late
            account.wasted += wasted
            account.in_time += event.prefired and not wasted and not event.late and event.reason != "failed"

    def _hold(self, replay: int, n_bytes: int, at_ns: int) -> None:
        before, accounts = self._held.get(replay, (0, ()))
        for account in accounts:
            account.hold(n_bytes - before, at_ns)
        if accounts:
            self._held[replay] = n_bytes, accounts

    def _of(self, call: int, label: str, session: str | None) -> tuple[Account, ...]:
        """The accounts that an event of a call goes to."""
        row = self._calls.get(call)
        by_label = self._labels.setdefault(label, Account())
        if row is None:
            row = self._calls[call] = CallRow(label, by_label.forwards)
            _forget_oldest(self._calls, self._keep)
        accounts = (self.total, by_label, row.account)
        return accounts if session is None else (*accounts, self._session(session).account)

    def _session(self, name: str) -> SessionRow:
        if name not in self._sessions:
            self._sessions[name] = SessionRow(name)
            _forget_oldest(self._sessions, self._keep)
        return self._sessions[name]

    def _warn_of_replays(self, row: CallRow) -> None:
        n = row.account.replays - row.account.failed
        if n > 1:
            why = (
                "are values let go between passes of its session?"
                if row.in_session > 1
                else "is backward split without a session?"
            )
            self._warn(("replays", row.label), f"{row.label} was replayed {n} times for one call: {why}")

    def _warn_of_drop(self, row: SessionRow) -> None:
        if row.dropped and not row.cleared:
            self._warn(
                ("dropped", row.opened),
                f"session {row.name} went away without clear_recompute_session. It was opened at {row.opened}.",
            )

    def _warn(self, key: tuple[str, str], sentence: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.warnings.append(sentence)
            _log.warning(sentence)


_HEAD = (
    "",
    "calls",
    "replays",
    "lazy",
    "in time",
    "late",
    "wasted",
    "failed",
    "held",
    "peak",
    "byte seconds",
    "replay",
)


def _cells(label: str, account: Account) -> list[str]:
    counts = ("forwards", "replays", "lazy", "in_time", "late", "wasted", "failed")
    return [
        label,
        *(str(getattr(account, name)) for name in counts),
        in_bytes(account.held_bytes),
        in_bytes(account.peak_bytes),
        f"{in_bytes(account.byte_s)} s",
        in_seconds(account.replay_s),
    ]


def _session_cells(row: SessionRow) -> list[str]:
    account = row.account
    return [row.name, in_bytes(account.held_bytes), in_bytes(account.peak_bytes), str(account.replays), row.opened]


def _forget_oldest(rows: dict[Any, Any], keep: int) -> None:
    if len(rows) > keep:
        del rows[next(iter(rows))]
