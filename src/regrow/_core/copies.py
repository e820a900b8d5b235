"""Copies of several tensors at once, which share memory where the tensors do. Must never share memory with them."""

from __future__ import annotations

from collections import Counter

import torch

from regrow._core import compat


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each; tensors that are one, or lie in one storage, stay so among the copies."""
    if len(tensors) == 1:
        return [tensors[0].detach().clone()]
    storages = [compat.storage_key(tensor) for tensor in tensors]
    shared = {key for key, times in Counter(storages).items() if times > 1 and key is not None}
    made: dict[int, torch.Tensor] = {}
    by_storage: dict[int, torch.UntypedStorage] = {}
    for tensor, key in zip(tensors, storages, strict=True):
        if id(tensor) in made:
            continue
        if key is None or key not in shared:
            made[id(tensor)] = tensor.detach().clone()
            continue
        if key not in by_storage:
            by_storage[key] = tensor.untyped_storage().clone()
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        made[id(tensor)] = tensor.detach().new_empty(0).set_(by_storage[key], *place)
    return [made[id(tensor)] for tensor in tensors]
