"""The private names of autograd's nodes that reports look at, and why. Must never hold behaviour of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def saved_by(node: Any) -> Iterator[tuple[Any, Any]]:
    """What a node of the graph has saved, as hooks packed it, and the hook that would unpack it; nothing is unpacked.

    Deleted by a public view of saved tensors that does not unpack them.
    """
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            saved = getattr(node, name)
            for each in saved if isinstance(saved, (tuple, list)) else (saved,):
                if each is not None and each.data is not None:
                    yield each.data, each.unpack_hook


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a parameter or an input, or a view of one: it is there without the graph, too.

    Deleted by a public attribute for the base of a view.
    """
    base: torch.Tensor | None = tensor._base
    whole = tensor if base is None else base
    return whole.is_leaf and whole.requires_grad
