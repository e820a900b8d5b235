"""Graph: what a replay built that is kept, and the passes that run through it. Must never run the function.

    outputs --> ... --> leaves, which stand for the inputs of the call
                 |
                 v
             parameters that the function captures

A replay that serves one whole backward needs none of this: that is `whole`, and leaves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node

from regrow import errors
from regrow._core import compat
from regrow._core.faults import CheckpointError, ReplayMismatchError
from regrow._core.split import Split, edges_of
from regrow._engines.function import _compat
from regrow._engines.function.slots import Slots

Grads = tuple[torch.Tensor | None, ...]
Leaves = list[torch.Tensor | None]


def whole(label: str, outputs: Sequence[torch.Tensor], leaves: Leaves, grads: Grads, *, compare: bool) -> Grads:
    """Backward through a graph that nobody needs again: gradients of the leaves; parameters accumulate theirs."""
    if len(outputs) == len(grads) == 1:  # as in most calls
        (output,), (grad,) = outputs, grads
        if grad is not None and output.requires_grad:
            # Autograd itself compares devices.
            if compare and (output.shape != grad.shape or output.dtype is not grad.dtype):
                _refuse(label, outputs, grads)
            _compat.backward((output,), (grad,))
    else:
        check_same(label, outputs, grads, compare=compare)
        known = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        if known:
            _compat.backward(*zip(*known, strict=True))
    return tuple([None if leaf is None else leaf.grad for leaf in leaves])


def check_same(label: str, outputs: Sequence[Any], grads: Grads, *, compare: bool) -> None:
    """Refuse a replay whose outputs are not forward's: their gradients look as forward's outputs did."""
    if len(outputs) != len(grads):
        raise ReplayMismatchError(
            errors.other_count(label, len(grads), len(outputs)),
            label=label,
            forward=len(grads),
            replay=len(outputs),
            indices=(),
        )
    if not compare:
        return
    for output, grad in zip(outputs, grads, strict=True):
        if grad is not None and (
            output.shape != grad.shape or output.dtype != grad.dtype or output.device != grad.device
        ):
            _refuse(label, outputs, grads)


def _refuse(label: str, outputs: Sequence[Any], grads: Grads) -> None:
    pairs = [(_look(grad), _look(output)) for output, grad in zip(outputs, grads, strict=True)]
    different = [index for index, (then, now) in enumerate(pairs) if then is not None and then != now]
    says = errors.other_outputs(label, [(index, *pairs[index]) for index in different])
    raise ReplayMismatchError(says, label=label, forward=len(grads), replay=len(outputs), indices=tuple(different))


def _look(tensor: Any) -> tuple[Any, ...] | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, str(tensor.device))


class Look(NamedTuple):
    """What an output looked like, without it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Graph:
    """The graph of one replay, from edge to edge. To be made while gradients are enabled.

    Attributes:
        trimmed: whether what only dx reads was let go, so that dw alone can still run.

    Memory: holds the graph of the replay and the inputs; from dx to dw, the gradients that arrived at joints, those of
        the inputs if ``keep`` asked for it, and those of the outputs if ``compare`` did.
    """

    __slots__ = (
        "_before",
        "_compares",
        "_edges",
        "_found",
        "_given",
        "_label",
        "_leaves",
        "_looks",
        "_present",
        "_roots",
        "_slots",
        "_split",
        "trimmed",
    )

    def __init__(
        self, label: str, outputs: Sequence[torch.Tensor], leaves: Leaves, slots: Slots, *, before: int, compares: bool
    ) -> None:
        self._roots = edges_of(outputs)
        self._edges = edges_of(leaves)
        self._label = label
        self._looks = [Look(output.shape, output.dtype, output.device) for output in outputs]
        self._compares = compares
        self._leaves = leaves
        self._slots = slots
        self._before = before
        self._split: Split | None = None
        self._found: list[torch.Tensor | None] | None = None
        self._given: Grads | None = None
        self._present: list[bool] = []
        self.trimmed = False

    def check(self, grads: Grads) -> None:
        """Refuse a replay whose outputs are not forward's."""
        check_same(self._label, self._looks, grads, compare=self._compares)

    @property
    def is_cut(self) -> bool:
        """Whether dx has run."""
        return self._split is not None

    def had(self, grads: Grads) -> bool:
        """Whether dw can start from what dx kept: it was given these gradients, as far as that was noted."""
        if self._split is None:
            return False
        if self._given is None:
            return self._present == [grad is not None for grad in grads]
        pairs = zip(self._given, grads, strict=True)
        return all(one is other or (one is not None and other is not None and one.equal(other)) for one, other in pairs)

    def full(self, grads: Grads, *, keep: bool, only: list[bool] | None = None) -> Grads:
        """The whole backward at once; ``only`` these inputs, and all that is captured, if it says which."""
        known = _known(self._roots, grads)
        ends: list[GradientEdge] | None = None
        if only is not None:
            ends = [edge for edge, want in zip(self._edges, only, strict=True) if edge is not None and want]
            ends += [GradientEdge(node, 0) for node in self.captured()]
        if known and ends != []:
            edges, given = zip(*known, strict=True)
            torch.autograd.backward(edges, given, retain_graph=keep, inputs=ends)
        return tuple(_taken(leaf) for leaf in self._leaves)

    def through(self, grads: Grads, wanted: list[bool]) -> Grads:
        """Gradients of the inputs that are wanted; nothing is noted, and the graph stays."""
        return _grads(self._roots, self._inputs(wanted), grads)

    def dx(self, grads: Grads, wanted: list[bool], *, keep: bool, compare: bool) -> Grads:
        """Gradients of the inputs that are wanted; parameters are left alone, and what dw starts from is noted."""
        split = self._cut(self._inputs(wanted))
        with self._slots.noting(split.joints):
            found = split.dx(grads)
        self._split = split
        self._found = [grad if want and keep else None for grad, want in zip(found, wanted, strict=True)]
        self._given = grads if compare else None
        self._present = [grad is not None for grad in grads]
        return found

    def dw(self) -> Grads:
        """Parameters accumulate their gradients; those of the inputs as far as they are known."""
        split, self._split = self._split, None
        assert split is not None
        assert self._found is not None
        split.dw()
        late = [_taken(leaf) for leaf in self._leaves]
        return tuple(here if before is None else before for before, here in zip(self._found, late, strict=True))

    def trim(self) -> None:
        """Let go of what dx read and dw will not."""
        if self._split is not None:
            self.trimmed = True
            self._slots.let_go()

    def values(self) -> list[torch.Tensor]:
        """What it saved and holds."""
        return self._slots.values()

    def held_bytes(self) -> dict[int, int]:
        """Bytes of what the graph saved, by storage."""
        return self._slots.held_bytes()

    def captured(self) -> list[Node]:
        """Where the gradients of what the function captures are accumulated: leaves that are none of its inputs."""
        own = {edge.node for edge in self._edges if edge is not None}
        seen = {edge.node for edge in self._roots if edge is not None}
        waiting = list(seen)
        while waiting:
            fresh = {child for child, _ in waiting.pop().next_functions if child is not None} - seen
            seen |= fresh
            waiting += fresh
        return [node for node in seen - own if compat.is_accumulator(node)]

    def _inputs(self, wanted: list[bool]) -> list[GradientEdge | None]:
        return [edge if want else None for edge, want in zip(self._edges, wanted, strict=True)]

    def _cut(self, inputs: list[GradientEdge | None]) -> Split:
        split = Split(self._roots, inputs)
        if split.leads_before(self._before):
            raise CheckpointError(errors.captured_graph(self._label, ""), label=self._label)
        return split


def _known(roots: Sequence[GradientEdge | None], grads: Grads) -> list[tuple[GradientEdge, torch.Tensor]]:
    return [(edge, grad) for edge, grad in zip(roots, grads, strict=True) if edge is not None and grad is not None]


def _grads(roots: Sequence[GradientEdge | None], inputs: list[GradientEdge | None], grads: Grads) -> Grads:
    known, wanted = _known(roots, grads), [edge for edge in inputs if edge is not None]
    if not known or not wanted:
        return (None,) * len(inputs)
    edges, given = zip(*known, strict=True)
    found = iter(torch.autograd.grad(edges, wanted, given, retain_graph=True, allow_unused=True))
    return tuple(None if edge is None else next(found) for edge in inputs)


def _taken(leaf: torch.Tensor | None) -> torch.Tensor | None:
    if leaf is None:
        return None
    grad, leaf.grad = leaf.grad, None
    return grad
