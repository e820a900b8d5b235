"""Graft: a SAVE region of a call whose forward leaves no graph keeps a graph of its own, which replays take in.

    forward   inputs --> gate --> region, recorded --> outputs, handed on without their graph
    replay    inputs --> bridge ---------------------> outputs, as they were kept
    backward             bridge: through the region's own graph, from its outputs to the gate

The bridge cuts its own backward, as the node of a call does: asked for its inputs alone it leaves the region's
parameters to a second half, which is asked for its trigger.

In such a forward nobody can tell which tensors will need a gradient. So every floating tensor that the region is given
counts as one that does, but for parameters, which the region sees as they are, and for what is known to be constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from regrow._core import compat
from regrow._core.split import Split, edges_of

Grads = tuple[torch.Tensor | None, ...]


class Graft:
    """The graph of one region.

    Attributes:
        trigger: what the second half of a backward is asked for; None if the region has no parameters.

    Memory: holds the graph, and what it saved, until the call is let go or its graph dies. Any number of backwards run
        through it.
    """

    __slots__ = ("_gate", "_gated", "_lock", "_roots", "_same", "trigger")

    def __init__(self, inputs: list[torch.Tensor], is_constant: Callable[[torch.Tensor], bool]) -> None:
        """Open the gate.

        Args:
            inputs: the tensors that the region is given.
            is_constant: whether one of them needs no gradient, or takes it as a parameter does.
        """
        first: dict[int, int] = {}
        self._same = [first.setdefault(id(tensor), index) for index, tensor in enumerate(inputs)]
        self._gated = [
            index
            for index, tensor in enumerate(inputs)
            if self._same[index] == index
            and (tensor.is_floating_point() or tensor.is_complex())
            and not is_constant(tensor)
        ]
        self._gate: Node | None = None
        self._lock = RLock()
        self._roots: list[GradientEdge | None] = []
        self.trigger: torch.Tensor | None = None

    def behind_gate(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs as the region gets them."""
        found = list(inputs)
        if self._gated:
            key = torch.empty(0, device="cpu", requires_grad=True)
            opened = _Gate.apply(key, *(inputs[index] for index in self._gated))  # type: ignore[no-untyped-call]
            self._gate = opened[0].grad_fn
            for index, tensor in zip(self._gated, opened, strict=True):
                found[index] = tensor
        return [found[index] for index in self._same]  # what is given twice goes in once

    def close(self, outputs: Sequence[torch.Tensor]) -> None:
        """The region has returned these, of those that take a gradient."""
        self._roots = edges_of(outputs)
        if any(compat.is_accumulator(node) for node in self._nodes()):
            self.trigger = torch.empty(0, device="cpu", requires_grad=True)

    def bridge(self, values: list[torch.Tensor], inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs in a replay.

        Args:
            values: aliases of what was kept of the outputs that take a gradient.
            inputs: the tensors that the replay gives the region.
        """
        given = [inputs[index] for index in self._gated]
        made: tuple[torch.Tensor, ...] = _Bridge.apply(self, values, self.trigger, *given)  # type: ignore[no-untyped-call]
        return made

    def full(self, grads: Grads, wanted: list[bool]) -> Grads:
        """The whole backward: parameters accumulate."""
        known = _known(self._roots, grads)
        if not known:
            return (None,) * len(self._gated)
        edges, given = [edge for edge, _ in known], [grad for _, grad in known]
        if self.trigger is None:
            return self._captured(edges, given, wanted)
        with self._lock:  # the gate notes what arrives, for one backward at a time
            torch.autograd.backward(edges, given, retain_graph=True)
            found: Grads = () if self._gate is None else self._gate.found  # type: ignore[attr-defined]
            if self._gate is not None:
                self._gate.found = ()  # type: ignore[attr-defined]
        return found or (None,) * len(self._gated)

    def again(self, grads: Grads, wanted: list[bool]) -> Grads:
        """Gradients of the inputs alone, another time."""
        known = _known(self._roots, grads)
        return self._captured([edge for edge, _ in known], [grad for _, grad in known], wanted)

    def cut(self, wanted: list[bool]) -> Split:
        """This backward in two halves."""
        return Split(self._roots, self._ends(wanted))

    def _captured(self, edges: list[GradientEdge], given: list[torch.Tensor], wanted: list[bool]) -> Grads:
        ends = self._ends(wanted)
        targets = [edge for edge in ends if edge is not None]
        if not targets or not edges:
            return (None,) * len(ends)
        found = iter(torch.autograd.grad(edges, targets, given, retain_graph=True, allow_unused=True))
        return tuple(None if edge is None else next(found) for edge in ends)

    def _ends(self, wanted: list[bool]) -> list[GradientEdge | None]:
        gate = self._gate
        return [GradientEdge(gate, index) if want and gate is not None else None for index, want in enumerate(wanted)]

    def _nodes(self) -> Iterator[Node]:
        seen = {edge.node for edge in self._roots if edge is not None}
        waiting = [*seen]
        for node in waiting:  # grows while it is walked
            yield node
            if node is not self._gate:
                fresh = {child for child, _ in node.next_functions if child is not None} - seen
                seen |= fresh
                waiting += fresh


class _Gate(torch.autograd.Function):
    """Where the region's own graph begins."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Let the inputs in."""
        ctx.set_materialize_grads(False)
        ctx.found = ()
        return tuple(tensor.detach() for tensor in inputs)  # as a view it could not be written, and seen to be

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Note what has arrived."""
        ctx.found = grads
        return None, *(None for _ in grads)


class _Bridge(torch.autograd.Function):
    """Outputs of a region in a replay, and the way through its own graph.

    Source: `regrow._core.split` runs a node that ``cuts_itself`` for its trigger in dw, and only then.
    """

    @staticmethod
    def forward(
        ctx: Any, graft: Graft, values: list[torch.Tensor], trigger: torch.Tensor | None, *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Give what was kept."""
        ctx.set_materialize_grads(False)
        ctx.graft, ctx.split = graft, None
        ctx.cuts_itself = trigger is not None
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """The half that is asked for, or both."""
        graft: Graft = ctx.graft
        befores = [before for before, _ in ctx.next_functions]  # of the tensors among the arguments
        trigger = befores.pop(0) if ctx.cuts_itself else None
        wanted = [before is not None and compat.is_wanted(before) for before in befores]
        if trigger is not None and not compat.is_wanted(trigger):
            found = _first_half(ctx, graft, grads, wanted)
        elif ctx.split is not None and not any(wanted):
            split, ctx.split = ctx.split, None
            split.dw()
            found = (None,) * len(wanted)
        else:
            found = graft.full(grads, wanted)
        return None, None, None if graft.trigger is None else graft.trigger.detach(), *found


def _first_half(ctx: Any, graft: Graft, grads: Grads, wanted: list[bool]) -> Grads:
    if ctx.split is not None:
        return graft.again(grads, wanted)
    ctx.split = graft.cut(wanted)
    found: Grads = ctx.split.dx(grads)
    return found


def _known(roots: Sequence[GradientEdge | None], grads: Grads) -> list[tuple[GradientEdge, torch.Tensor]]:
    return [(edge, grad) for edge, grad in zip(roots, grads, strict=True) if edge is not None and grad is not None]
