"""Bytes of storages, each once. Must never keep one.

In one pass for all: they are asked for every value of a replay while somebody listens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch

from regrow._core import _compat, compat

_storage_of, _n_bytes = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes


def storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by `compat.storage_key`; tensors without a storage of their own are left out."""
    storages = _storages(list(tensors))
    return dict(zip(map(_compat.storage_id, storages), map(_n_bytes, storages), strict=True))


def sole_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """`storage_bytes` of the storages that only these tensors keep alive."""
    storages = _storages({id(tensor): tensor for tensor in tensors}.values())
    keys = list(map(_compat.storage_id, storages))
    ours = Counter(keys)
    rows = zip(keys, map(_compat.storage_users, keys), map(_n_bytes, storages), strict=True)
    return {key: n_bytes for key, users, n_bytes in rows if users <= ours[key] + _LISTED}


def sum_of_sole_bytes(tensors: list[torch.Tensor]) -> int:
    """The sum of `sole_bytes`; quick where no two of the tensors share a storage."""
    storages = _storages(tensors)
    keys = list(map(_compat.storage_id, storages))
    if len(set(keys)) != len(keys):
        del storages
        return sum(sole_bytes(tensors).values())
    rows = zip(map(_compat.storage_users, keys), map(_n_bytes, storages), strict=True)
    return sum([n_bytes for users, n_bytes in rows if users <= 1 + _LISTED])


_LISTED = 1  # one more user of a storage is the object of Python that a list here holds


def _storages(tensors: Collection[torch.Tensor]) -> list[torch.UntypedStorage]:
    try:
        return list(map(_storage_of, tensors))
    except (NotImplementedError, RuntimeError):
        return [tensor.untyped_storage() for tensor in tensors if compat.storage_key(tensor) is not None]
