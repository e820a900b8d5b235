"""Carrier: a backward of one node that carries a prefire, so that code which asks finds itself inside backward.

FSDP2 tells a recompute from a forward by whether a graph task runs on the thread. In a recompute it gathers parameters,
as it does in backward, but neither shards them again behind the module nor notes the order of forward.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_common.py, ``is_bw``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from regrow import errors

_log = logging.getLogger("regrow")


def carry(work: Callable[[], None]) -> None:
    """Run work inside a graph task of its own; what it raises is raised here."""
    with torch.enable_grad():
        root = _Carrier.apply(torch.empty(0, device="cpu", requires_grad=True), work)  # type: ignore[no-untyped-call]
    root.backward(torch.empty(0, device="cpu"))  # whatever the default device is: on this thread


@lru_cache(maxsize=4096)
def say_sharded(label: str) -> None:
    """Say, once for each function, that a call cannot be replayed before backward gathers its parameters."""
    _log.warning(errors.sharded(label))


class _Carrier(torch.autograd.Function):
    """A node that needs nothing and gives nothing."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        """Note the work."""
        ctx.work = work
        return source.view_as(source)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Do it."""
        ctx.work()
        return None, None
