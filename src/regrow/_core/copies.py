"""Copies of several tensors at once, which share memory where the tensors do. Must never share memory with them."""

from __future__ import annotations

from collections import Counter

import torch

from regrow._core import compat

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
# What new storages are aligned to, so that a copy of a part keeps every view aligned.
_ALIGNMENT = 64


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each; tensors that are one, or lie in one storage, stay so among the copies.

    Of a storage only what the tensors span is copied. A copy needs a gradient where its tensor does, and has its
    attributes.
    """
    storages = [compat.storage_key(tensor) if _is_plain(tensor) else None for tensor in tensors]
    shared = {key for key, times in Counter(storages).items() if times > 1 and key is not None}
    made: dict[int, torch.Tensor] = {}
    spans = {
        key: _Span([tensor for tensor, other in zip(tensors, storages, strict=True) if other == key]) for key in shared
    }
    for tensor, key in zip(tensors, storages, strict=True):
        if id(tensor) in made:
            continue
        if key is None or (key not in shared and tensor.is_contiguous()):
            copy = tensor.detach().clone()
        else:
            copy = (spans[key] if key in shared else _Span([tensor])).again(tensor)
        if tensor.requires_grad:
            copy = _with_grad_of(copy, tensor)
        if tensor.__dict__:
            copy.__dict__.update(tensor.__dict__)
        made[id(tensor)] = copy
    return [made[id(tensor)] for tensor in tensors]


def span_bytes(tensor: torch.Tensor) -> int:
    """From the first to the last byte of a tensor: of an expanded one no more than what it is expanded from."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    return (_end(tensor) - int(tensor.storage_offset())) * tensor.element_size()


class _Span:
    """A copy of the part of a storage that some tensors lie in."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        first = min(tensor.storage_offset() * tensor.element_size() for tensor in tensors)
        last = max(_end(tensor) * tensor.element_size() for tensor in tensors)
        self._begin = first - first % _ALIGNMENT
        whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(tensors[0].untyped_storage())
        self._storage = whole[self._begin : last].clone().untyped_storage()

    def again(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of one of the tensors."""
        offset = tensor.storage_offset() - self._begin // tensor.element_size()
        return tensor.detach().new_empty(0).set_(self._storage, offset, tensor.size(), tensor.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a part of its storage."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _end(tensor: torch.Tensor) -> int:
    """The element of the storage behind the last one of a tensor."""
    if not tensor.numel():
        return int(tensor.storage_offset())
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return int(tensor.storage_offset() + 1 + sum((size - 1) * stride for size, stride in steps))


def _with_grad_of(copy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    copy.requires_grad_()
    if tensor.is_leaf:
        return copy
    with torch.enable_grad():
        return copy.clone()  # no leaf: forward may write into it
