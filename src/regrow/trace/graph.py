"""What a graph holds for backward. Looks at what its nodes saved without reading it, so nothing is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from regrow._core import trees
from regrow._core.frame import Frame
from regrow._engines.hooks.slots import Slot, kept_in
from regrow.trace import _compat
from regrow.trace.holdings import without_lent
from regrow.trace.report import Found, Report, report


def saved_tensors_report(*tensors: torch.Tensor) -> Report:
    """List what the graph of a loss holds for backward, by node, shape and type. Nothing is read or replayed.

    Kinds are "saved" (by a node), "leaf" (a parameter or an input, which is there anyway), "packed" (what saved-tensor
    hooks made of it), and for checkpointed calls "input", "kept" and "replayed", with the function's name. A storage
    counts once, a leaf's before others.

    Args:
        *tensors: the loss, or any outputs.

    Returns:
        A report: ``print`` it, or read ``rows``, ``total_bytes``, ``bytes_by("kind")``, ``to_json()``.

    Raises:
        ValueError: something given is no tensor, or was not computed from anything that needs a gradient.

    Memory: keeps nothing. What a custom Function has put on its ``ctx`` other than by ``save_for_backward`` does not
        show; and what backward has freed is gone.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.grad_fn is None:
            raise ValueError(f"loss must be a tensor with a graph, got {_described(tensor)}.")
    found = [each for node in _nodes(tensors) for each in _held_by(node)]
    frames = {id(frame): frame for _, frame in found if isinstance(frame, Frame)}
    # The values of a call on saved-tensor hooks lie in the graph itself.
    apart = {id(frame) for frame in map(_frame_of, _nodes(tensors)) if frame is not None}
    calls = [
        Found(frame.label, holding.kind, "", holding.tensor)
        for frame in frames.values()
        for holding in frame.holdings()
        if holding.kind != "replayed" or id(frame) in apart
    ]
    saved = [each for each, _ in found if each is not None]
    leaves = [each for each in saved if each.kind == "leaf"]
    others = [*calls, *(each for each in saved if each.kind != "leaf")]
    return report([*leaves, *without_lent(others)])


def _nodes(tensors: tuple[torch.Tensor, ...]) -> Iterator[Any]:
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _held_by(node: Any) -> Iterator[tuple[Found | None, Frame | None]]:
    owned = _frame_of(node)
    if owned is not None:
        yield None, owned
    for packed, hook in _compat.saved_by(node):
        frame = _frame_behind(hook)
        if isinstance(packed, Slot):
            for value in kept_in(packed):
                yield Found(frame.label if frame else node.name(), "replayed", "", value), None
            yield None, frame
        elif isinstance(packed, torch.Tensor) and hook is None:
            kind = "leaf" if _compat.is_leaf(packed) else "saved"
            yield Found(node.name(), kind, "", packed), None
        else:
            for tensor in trees.tensors_in(packed):
                yield Found(node.name(), "packed", "", tensor), None


def _frame_of(node: Any) -> Frame | None:
    """The reentrant call whose node this is."""
    owned = getattr(node, "frame", None)
    return owned if isinstance(owned, Frame) else None


def _frame_behind(hook: Any) -> Frame | None:
    """The checkpointed call whose unpack hook this is."""
    for cell in getattr(hook, "__closure__", None) or ():
        if isinstance(cell.cell_contents, Frame):
            return cell.cell_contents
    return None


def _described(value: object) -> str:
    return "one without" if isinstance(value, torch.Tensor) else f"{value!r} of type {type(value).__name__}"
