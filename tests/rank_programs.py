"""What ranks run in tests of launching. Apart, for each rank is a fresh process that imports this."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

from regrow.cli.rank import joined


def wait_for_a_peer_that_ends(how: str) -> None:
    """Rank 0 waits for a message of rank 1, which ends instead of sending it."""
    with joined("cpu", loopback=True) as rank:
        rank.align()
        if rank.index == 0:
            dist.recv(torch.zeros(1), src=1)
        elif how == "raises":
            raise ZeroDivisionError("no more")
        elif how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
