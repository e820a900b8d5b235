"""Borders: which tensors of a SAVE region a replay makes again, and how to find them there. Must never hold one.

A region is given tensors that the replay computes anyway. What its operators save of those, the tensor itself or a view
of it, is described by where it lies in the input, and found again in the input that the replay brings:

    forward   input 1, storage: [.....xxxx....]    saved: 4 elements from the third on, seen as 2 x 2
    replay    input 1, another storage: [xxxx]     the same view of it

Not found this way, and so kept: parameters and other leaves, what another region of the call made, and what was
written since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from regrow._core import compat
from regrow._core.copies import span_bytes

_PLAIN = frozenset({torch.Tensor, nn.Buffer})


class Look(NamedTuple):
    """What an input of a region looks like."""

    shape: Sequence[Any]
    dtype: torch.dtype
    device: torch.device
    stride: Sequence[Any] | None

    def matches(self, other: Look, *, strides: bool) -> bool:
        """Whether two look the same, also in strides if views need that; a jagged length is never the same twice."""
        same = self[1:3] == other[1:3] and compat.same_shape(self.shape, other.shape)
        return same and (not strides or self.stride == other.stride)

    def __str__(self) -> str:
        """In a message: ``(2, 64) float32 cpu, strides (64, 1)``."""
        strides = "" if self.stride is None else f", strides {tuple(self.stride)}"
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} {self.device}{strides}"


class Part(NamedTuple):
    """Where a tensor lies in an input: which input, and for a view of it its geometry, in elements."""

    source: int
    view: tuple[Sequence[int], Sequence[int], int] | None

    def of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same part of other inputs of that look."""
        tensor = inputs[self.source]
        if self.view is None:
            return tensor
        size, stride, offset = self.view
        return tensor.as_strided(size, stride, int(tensor.storage_offset()) + offset)


class Border:
    """The inputs of one call of a region, while it runs.

    Memory: holds them until `close`.
    """

    def __init__(self, inputs: list[torch.Tensor], made_by_regions: frozenset[int]) -> None:
        """Note where the inputs lie.

        Args:
            inputs: the tensors that the region is given.
            made_by_regions: storages of what other regions of the call made: no replay makes those again.
        """
        self._inputs = inputs
        self._versions = compat.versions_of(inputs)
        self._by_storage: dict[int | None, list[int]] = {}
        for index, tensor in enumerate(inputs):
            key = compat.storage_key(tensor)
            is_leaf = tensor.grad_fn is None and compat.takes_gradient(tensor)
            if not is_leaf and key not in made_by_regions:
                self._by_storage.setdefault(key, []).append(index)

    def find(self, tensor: torch.Tensor) -> Part | None:
        """Where a tensor lies in an input, as the input was when the region began; None if nowhere.

        Of inputs that share memory the tensor itself comes first, then one that takes a gradient if the tensor does.
        """
        indices = self._by_storage.get(compat.storage_key(tensor), [])
        if len(indices) > 1:
            wanted = compat.takes_gradient(tensor)
            rank = [
                (mine is not tensor, compat.takes_gradient(mine) != wanted, index)
                for index, mine in ((index, self._inputs[index]) for index in indices)
            ]
            indices = [index for *_, index in sorted(rank)]
        found = (self._part(index, tensor) for index in indices)
        return next((part for part in found if part is not None), None)

    def itself(self, tensor: torch.Tensor) -> Part | None:
        """Which input a tensor is, whoever made it; None if it is none."""
        found = (index for index, mine in enumerate(self._inputs) if mine is tensor)
        return next((Part(index, None) for index in found), None)

    def written(self) -> list[int]:
        """The inputs that were written since the region began."""
        now = compat.versions_of(self._inputs)
        return [index for index, (then, version) in enumerate(zip(self._versions, now, strict=True)) if then != version]

    def looks(self) -> list[Look]:
        """What the inputs look like."""
        return [look(tensor) for tensor in self._inputs]

    def close(self) -> None:
        """Let go of the inputs."""
        self._inputs = []
        self._by_storage = {}

    def _part(self, index: int, tensor: torch.Tensor) -> Part | None:
        mine = self._inputs[index]
        if compat.version_of(tensor) != self._versions[index]:
            return None
        if tensor is mine:
            return Part(index, None)
        if not (_is_strided(tensor) and _is_strided(mine)) or tensor.dtype != mine.dtype:
            return None
        offset = int(tensor.storage_offset()) - int(mine.storage_offset())
        if offset < 0 or offset * mine.element_size() + span_bytes(tensor) > span_bytes(mine):
            return None
        if offset == 0 and tensor.shape == mine.shape and tensor.stride() == mine.stride():
            return Part(index, None)
        return Part(index, (tensor.shape, tensor.stride(), offset))


def look(tensor: torch.Tensor) -> Look:
    """What a tensor looks like."""
    return Look(tensor.shape, tensor.dtype, tensor.device, tensor.stride() if _has_strides(tensor) else None)


def _has_strides(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether views of a tensor are told by their geometry alone."""
    return type(tensor) in _PLAIN and _has_strides(tensor)
