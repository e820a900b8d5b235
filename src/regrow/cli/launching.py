"""Launching: ranks as processes of this machine, with torch's own launcher. Must never know what they do.

Where torchrun has started this process already, it is a rank itself, and nothing is launched.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from regrow.cli import interrupts

_LOUD = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)
_POLL_S = 0.05  # well below what a rank takes to end after one that it needs has ended: the first is the one to name
_PATIENCE_S = 1  # for ranks that are asked to end: they have nothing to save


@dataclass(frozen=True, slots=True)
class Started:
    """What torchrun said to this process: how many ranks there are, in all and on this machine, and which it is."""

    n_ranks: int
    n_here: int
    rank: int
    rank_here: int


class RankError(Exception):
    """A rank ended before its work was done.

    Attributes:
        rank: which.
        reason: a sentence.
        traceback: of its exception; empty where it was killed.
    """

    def __init__(self, rank: int, reason: str, traceback: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank, self.reason, self.traceback = rank, reason, traceback


def started() -> Started | None:
    """Who this process is among ranks that torchrun started; None where it did not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or "RANK" not in os.environ:
        return None
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
    return Started(*(int(os.environ[name]) for name in names))


def launch(n_ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function on every rank, each a fresh process of this machine.

    Args:
        n_ranks: how many.
        work: a function of a module, for other processes must find it. It reads its rank from the environment.
        *arguments: what it is called with.

    Returns:
        What it returned on rank 0.

    Raises:
        RankError: one ended with an exception, or was killed; the others have been ended.
        SystemExit: Ctrl-C, or another signal that asks this process to end; the ranks have been ended.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n_ranks,
        run_id=f"regrow-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a port that is free
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=_POLL_S,
        start_method="spawn",
        shutdown_timeout=_PATIENCE_S,
    )
    sys.stdout.flush()  # before ranks write to it
    try:
        with _quiet(), interrupts.withheld_from_children():
            return elastic_launch(config, _enter)(work, *arguments)[0]
    except ChildFailedError as error:
        raise _explained(*error.get_first_failure()) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None


def _enter(work: Callable[..., Any], *arguments: Any) -> Any:
    """Where a rank begins."""
    interrupts.answer()
    return work(*arguments)


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which the launcher's logs do not tell what `RankError` says."""
    levels = {name: logging.getLogger(name).level for name in _LOUD}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _explained(rank: int, failure: ProcessFailure) -> RankError:
    told = failure.error_file_data.get("message") if failure.error_file_data else None
    if isinstance(told, dict):
        return RankError(rank, f"failed: {told['message']}", told.get("extraInfo", {}).get("py_callstack", ""))
    if failure.exitcode < 0:
        return RankError(rank, f"was killed by {failure.signal_name()}", "")
    return RankError(rank, f"ended with status {failure.exitcode}", "")
