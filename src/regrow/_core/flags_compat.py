"""Flags of process and thread that replays restore, behind private names of torch: why each, and what deletes it.

Apart from the other private names: these are asked as a whole, several times per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from regrow._core.compat import _private

# Which implementations of attention are allowed, and in which order; torch.nn.attention can set but not read them.
# Deleted by a public getter of what sdpa_kernel set.
_attention_getters: tuple[Callable[[], Any], ...] = tuple(
    _private("torch._C", f"_get_{name}_sdp_enabled", "replays use forward's attention backends")
    for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
)
_attention_setters: tuple[Callable[[Any], None], ...] = tuple(
    _private("torch._C", f"_set_sdp_use_{name}", "replays use forward's attention backends")
    for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
)
_attention_order: Callable[[], list[int]] = _private(
    "torch._C", "_get_sdp_priority_order", "replays use forward's attention backends"
)
_set_attention_order: Callable[[list[int]], None] = _private(
    "torch._C", "_set_sdp_priority_order", "replays use forward's attention backends"
)


_flash, _efficient, _math, _cudnn, _other = _attention_getters

# Flags behind public functions of Python, asked twice per call. Deleted if those become cheap.
_deterministic: Callable[[], bool] = _private(
    "torch._C", "_get_deterministic_algorithms", "replays use forward's flags"
)
_cpu_autocast, _cpu_autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_autocast_cache, _inference = torch.is_autocast_cache_enabled, torch.is_inference_mode_enabled
_default_dtype = torch.get_default_dtype
_warn_only: Callable[[], bool] = _private(
    "torch._C", "_get_deterministic_algorithms_warn_only", "replays use forward's flags"
)
_precision: Callable[[], str] = _private("torch._C", "_get_float32_matmul_precision", "replays use forward's flags")


def surroundings() -> tuple[Any, ...]:
    """What nearly always is as it was, to compare as a whole.

    Four of this thread: autocast on the CPU, its type, its cache, inference mode; then flags of the process that change
    what operators compute: default dtype, determinism and whether it only warns, matmul precision, six of attention.
    """
    try:
        precision: str | None = _precision()
    except RuntimeError:  # set through torch.backends.*.fp32_precision, which the older getter cannot express
        precision = None
    return (
        _cpu_autocast("cpu"),
        _cpu_autocast_dtype("cpu"),
        _autocast_cache(),
        _inference(),
        _default_dtype(),
        _deterministic(),
        _warn_only(),
        precision,
        _flash(),
        _efficient(),
        _math(),
        _cudnn(),
        _other(),
        _attention_order(),
    )


def set_attention_backends(wanted: tuple[Any, ...]) -> None:
    """Allow what the last six of `surroundings` said."""
    *allowed, order = wanted
    for setter, value in zip(_attention_setters, allowed, strict=True):
        setter(value)
    _set_attention_order(order)
