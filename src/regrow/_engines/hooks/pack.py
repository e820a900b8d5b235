"""Pack: forward saves a tensor, the graph gets a slot. Once per saved tensor, so nothing is done that can wait."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch

from regrow._engines.hooks.replay import HooksFrame
from regrow._engines.hooks.slots import Slot


def make_pack(frame: HooksFrame) -> Callable[[torch.Tensor], Slot]:
    """The pack hook of one call."""
    add = frame.saved.append
    if frame.compares:

        def pack(tensor: torch.Tensor) -> Slot:
            slot = Slot()
            add((ref(slot), tensor.shape, tensor.dtype, tensor.is_cpu or tensor.device))
            return slot

        return pack

    def pack_blindly(tensor: torch.Tensor) -> Slot:
        slot = Slot()
        add((ref(slot), None, None, None))
        return slot

    return pack_blindly
