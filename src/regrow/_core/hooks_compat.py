"""Hooks that lie on tensors, behind private attributes of torch: why, and what deletes it. No behaviour of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

_hooks_on = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_NO_HOOKS = (None, None)


def hooks_on(tensors: list[Any]) -> set[int] | None:
    """The keys of hooks for gradients, and for leaves that have accumulated theirs; None where there are none.

    Deleted by a public list of them.
    """
    found = list(map(_hooks_on, tensors))
    if found.count(_NO_HOOKS) == len(found):
        return None
    return {key for pair in found for hooks in pair for key in hooks or ()}


def drop_other_hooks(tensors: list[Any], known: set[int] | None) -> None:
    """Take away those that were put on since."""
    found = list(map(_hooks_on, tensors))
    if found.count(_NO_HOOKS) == len(found):
        return
    for pair in found:
        for hooks in pair:
            for key in set(hooks or ()).difference(known or ()):
                del hooks[key]


@contextmanager
def without_tensor_hooks(leaves: list[torch.Tensor]) -> Iterator[None]:
    """Leaves without the hooks of ``Tensor.register_hook``, which run when the gradient is accumulated, not before.

    Deleted by a capture of a leaf's gradient that runs no hooks.
    """
    hooks = [(leaf, leaf._backward_hooks) for leaf in leaves if leaf._backward_hooks]
    for leaf, _ in hooks:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, found in hooks:
            leaf._backward_hooks = found
