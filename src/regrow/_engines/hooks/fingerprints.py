"""Fingerprints: the bits of a tensor as one number. Must never keep a tensor, nor let a mode see what is computed.

Each element is weighted by its place, so what is permuted differs; sums are modulo 2 to the 64.
"""

from __future__ import annotations

import torch

from regrow._core import compat

SAMPLE = 64  # elements of a tensor, where not all are looked at
_CHUNK = 1 << 20  # elements at once: 16 bytes each are needed while it runs
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor, *, sample: bool) -> int | None:
    """A number that differs where bits differ; None for what has no plain memory to look at."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or compat.tracing():
        return None
    try:
        with compat.without_dispatch_modes(), torch.no_grad():
            return _sum(_bits(tensor.detach(), sample=sample))
    except (RuntimeError, NotImplementedError, TypeError, KeyError):
        return None  # a subclass, or a device, that lacks an operator for it


def _bits(tensor: torch.Tensor, *, sample: bool) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().reshape(-1)
    if sample:
        flat = flat[:: max(1, flat.numel() // SAMPLE)]
    return flat.contiguous().view(_INTEGERS[flat.element_size()])


def _sum(bits: torch.Tensor) -> int:
    total = 0
    for number, chunk in enumerate(bits.split(_CHUNK)):
        first = 2 * number * _CHUNK + 1
        weights = torch.arange(first, first + 2 * chunk.numel(), 2, device=chunk.device)
        total += int((chunk.to(torch.int64) * weights).sum())
    return (total + bits.numel()) % (1 << 64)
