"""Outputs: what a forward without a graph returned, made fit to be the outputs of one node.

A node's output is a tensor that nobody else holds: autograd writes its history into it. So each output is an alias. An
alias of what has a history of its own, an input or a parameter that is returned, is a view, and so are two outputs that
share memory: autograd refuses to change those in place, as it could not tell what else changes with them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from regrow import errors
from regrow._core import compat, trees


def taken_apart(label: str, output: Any) -> tuple[tuple[torch.Tensor, ...], trees.Template | None]:
    """The tensors of an output, and the template to put them back into; None if it is one tensor."""
    if type(output) is torch.Tensor:
        return (output,), None
    tensors, template = trees.flatten((output,), {})
    hidden = [value for value in template.opaque if _hides_tensors(value)]
    if hidden:
        raise ValueError(errors.hidden_output(label, type(hidden[0]).__name__))
    if not tensors:
        raise ValueError(errors.no_output(label, type(output).__name__))
    return tuple(tensors), None if template is trees.TENSORS_ONLY else template


def aliases(found: tuple[torch.Tensor, ...], *, recorded: bool) -> tuple[torch.Tensor, ...]:
    """Tensors that nobody else holds.

    Args:
        found: what forward returned.
        recorded: whether forward recorded a graph, which must not be held.
    """
    if len(found) == 1:
        return (_alias(found[0], recorded=recorded),)
    storages = [compat.storage_key(tensor) for tensor in found]
    times = Counter(storages)
    return tuple(
        _view(tensor) if key is not None and times[key] > 1 else _alias(tensor, recorded=recorded)
        for tensor, key in zip(found, storages, strict=True)
    )


def _alias(tensor: torch.Tensor, *, recorded: bool) -> torch.Tensor:
    base = tensor._base if tensor._is_view() else tensor
    own = base is not None and base.requires_grad and (base.is_leaf or not recorded)
    return _view(tensor) if own else tensor.detach()


def _view(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().view_as(tensor) if tensor.grad_fn is not None else tensor.view_as(tensor)


def _hides_tensors(value: Any) -> bool:
    """Whether an object that is no known container has tensors among its attributes."""
    fields = getattr(value, "__dict__", None) or {}
    return not isinstance(value, torch.nn.Module) and bool(trees.tensors_in(list(fields.values())))
