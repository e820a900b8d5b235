"""Runs one function on several ranks, each a process with one thread, and brings back what they return."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def on_ranks(n_ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``work(rank, *args)`` returned on every rank, in a gloo process group of them all.

    Args:
        n_ranks: how many processes.
        work: a function of a module; it and its arguments travel to the other processes.
        *args: what it is given after the rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the others were ended.
    """
    with TemporaryDirectory() as folder:
        spawn(_rank, (n_ranks, folder, work, args), nprocs=n_ranks)
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(n_ranks)]


def _rank(rank: int, n_ranks: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    meeting_point = Path(folder, "meeting-point").as_uri()
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=n_ranks)
    try:
        _result(folder, rank).write_bytes(pickle.dumps(work(rank, *args)))
        dist.barrier()  # a rank that is done must not take the connections of the others with it
    finally:
        dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.pickle")
