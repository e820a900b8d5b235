"""Hooks that lie on tensors, behind private attributes of torch: why, and what deletes it.

A function that puts a hook on a tensor it is given, or captures, puts one more there in a replay. Forward's are those
that fire.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

# Hooks for gradients, and for leaves that have accumulated theirs. Deleted by a public list of them.
_hooks_on = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_NO_HOOKS = (None, None)

Noted = dict[int, dict[int, Any]]


def hooks_on(tensors: list[Any]) -> Noted:
    """What hooks there are, to be given to `put_back`."""
    found = list(map(_hooks_on, tensors))
    if found.count(_NO_HOOKS) == len(found):
        return {}
    return {id(hooks): dict(hooks) for pair in found for hooks in pair if hooks is not None}


def put_back(tensors: list[Any], noted: Noted) -> None:
    """Take away hooks that were put on since, and bring back those that were taken away.

    One that was taken away and replaced stays replaced: the function knows its last hook, and takes it away next time.
    """
    found = list(map(_hooks_on, tensors))
    if found.count(_NO_HOOKS) == len(found):
        return
    for hooks in [hooks for pair in found for hooks in pair if hooks is not None]:
        then = noted.get(id(hooks), {})
        gone = [key for key in then if key not in hooks]
        new = [key for key in hooks if key not in then]
        n_replaced = min(len(gone), len(new))
        for key in new[: len(new) - n_replaced]:
            del hooks[key]
        for key in gone[: len(gone) - n_replaced]:
            hooks[key] = then[key]


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
