"""Leaks: tensors with a graph that a function leaves elsewhere than in what it returns. Must never change a thing.

Where forward records no graph, what forward left there has none, so whoever uses it later gets no gradient through it.
Only a replay can tell: there the function leaves the same tensors with a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from regrow._core import trees


def with_grad(modules: Iterable[nn.Module]) -> str | None:
    """A buffer that needs a gradient: a replay runs on a copy of it. None if there is none."""
    for module in modules:
        for name, value in module._buffers.items():
            if value is not None and value.requires_grad:
                return f"{type(module).__name__}.{name}"
    return None


def in_modules(modules: Iterable[nn.Module]) -> str | None:
    """A buffer or an attribute that holds a tensor with a graph; None if there is none."""
    for module in modules:
        for values in (module._buffers, module.__dict__):
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None and not _is_made_by_hook(module, name):
                    return f"{type(module).__name__}.{name}"
    return None


def in_arguments(args: list[Any], kwargs: dict[str, Any], opaque: tuple[Any, ...]) -> bool:
    """Whether containers or objects among arguments, which were leaves without a graph, hold a graph now."""
    fields = [list(vars(value).values()) for value in opaque if _is_record(value)]
    return any(tensor.grad_fn is not None for tensor in trees.tensors_in([args, kwargs, fields]))


def _is_record(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value)


def _is_made_by_hook(module: nn.Module, name: str) -> bool:
    """Whether a hook computes it anew for every forward, as normalised and pruned weights are."""
    hooks = module._forward_pre_hooks.values()
    return any(name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None)) for hook in hooks)
