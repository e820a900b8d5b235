"""Rank: this process among those that train, and what they tell each other. Must never know what is trained."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's place, with the process group that it has joined."""

    index: int
    count: int
    device: torch.device

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gives, by rank; on every rank."""
        everyone: list[Any] = [None] * self.count
        dist.all_gather_object(everyone, mine)
        return everyone

    def agree(self, what: str, mine: Any) -> None:
        """Make sure that all ranks have the same.

        Raises:
            RuntimeError: on every rank, if one has something else than rank 0.
        """
        everyone = self.gather(mine)
        others = [index for index, theirs in enumerate(everyone) if theirs != everyone[0]]
        if others:
            raise RuntimeError(
                f"rank {others[0]} has other {what} than rank 0. Start all ranks with the same options, where the same "
                "text lies."
            )

    def tell(self, value: float | None) -> float:
        """The number that the one rank has that gives one; on every rank."""
        told = torch.zeros(1, dtype=torch.float64, device=self.device)
        if value is not None:
            told += value
        dist.all_reduce(told)
        return told.item()

    def align(self) -> None:
        """Go on when all have come here."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        dist.barrier()


@contextmanager
def joined(device_type: str, *, loopback: bool) -> Iterator[Rank]:
    """A context in which this process is a rank among others, told by the environment that its launcher made.

    Args:
        device_type: where it trains; an accelerator's index is the place among the ranks of this machine.
        loopback: whether all ranks are on this machine.

    Where its body raises, the process is about to end, and does not part from the others in form: they find out when
    it has ended, so whoever looks for the first that failed finds this one.
    """
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())  # the name of a machine may lead nowhere
    # Where a step fails, the exception says so; torch logs its whole schedule first.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    with steady(device):
        yield Rank(dist.get_rank(), dist.get_world_size(), device)
    dist.destroy_process_group()


@contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """A context in which figures repeat, whatever else the machine does; all steps are taken in it.

    On the CPU it is one thread: where other programs want a core, two threads wait for each other, many times a step.
    On accelerators it is attention by plain operators: the fused kernels may add up in another order each time.
    """
    if device.type != "cpu":
        with sdpa_kernel(SDPBackend.MATH):
            yield
        return
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _loopback() -> str:
    """The interface's name: lo, or lo0."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
