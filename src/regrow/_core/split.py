"""Split: one backward cut in two, for a pipeline stage or any other part of a graph. Must never change the graph.

A *joint* is a node on the way from the outputs to the inputs at which something else joins: a parameter, or something
computed from parameters alone.

    outputs --> node --> joint --> node --> joint --> inputs      dx walks this line, and keeps what arrives at joints
                           |                  |
                           v                  v
                       parameters         parameters              dw runs each joint once more, for its parameters only

A node asks the engine which gradients the running backward wants, so a matrix product computes one of its two gradients
in dx and the other in dw. Two kinds of parameters are computed in dx, where the work for them is done anyway, and
delivered in dw: those that two joints lead to, since adding two halves of a gradient one after the other may round
differently; and those of a custom Function, which computes all its gradients whenever it runs.

Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, for the cut; torch 2.13,
distributed/pipelining/_backward.py, for what stages expect of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from regrow._core import compat, hooks_compat
from regrow._core.frame import Frame

Grads = tuple[torch.Tensor | None, ...]


class Split:
    """A backward from some outputs to some inputs, in two passes.

    Memory: holds the graph, by its edges, and from dx to dw the gradients that arrived at joints, one per parameter or
    group of parameters that join there. Nothing once dw has run.

    Threads: both passes may run on any thread, one at a time.
    """

    __slots__ = ("_arrived", "_early", "_graph", "_inputs", "_late", "_roots")

    def __init__(self, roots: Sequence[GradientEdge | None], inputs: Sequence[GradientEdge | None]) -> None:
        """Look at the graph.

        Args:
            roots: where backward starts, one per output; None for an output without gradient.
            inputs: what dx is wanted for; None for an input without gradient.
        """
        self._roots = list(roots)
        self._inputs = list(inputs)
        self._graph: _Graph | None = _Graph([e for e in roots if e is not None], [e for e in inputs if e is not None])
        self._arrived: dict[Node, Grads] = {}
        self._early: list[tuple[Node, torch.Tensor]] = []
        self._late: list[tuple[GradientEdge, torch.Tensor]] = []

    def dx(self, grads: Sequence[torch.Tensor | None]) -> Grads:
        """Gradients of the inputs; parameters are left alone.

        Args:
            grads: the gradients of the outputs, one per root; where it is None that output contributes nothing.

        Returns:
            One per input; None where the input has none.
        """
        graph = self._taken_apart()
        given = [(edge, grad) for edge, grad in zip(self._roots, grads, strict=True) if edge is not None]
        known = [(edge, grad) for edge, grad in given if grad is not None]
        ways = [(edge, grad) for edge, grad in known if graph.leads(edge.node)]
        self._late = [(edge, grad) for edge, grad in known if not graph.leads(edge.node)]
        wanted = [edge for edge in self._inputs if edge is not None and ways]
        early = graph.early
        hooks = [joint.register_prehook(self._keep(joint)) for joint in graph.joints]
        try:
            with hooks_compat.without_tensor_hooks([compat.variable_of(leaf) for leaf in early]):
                found = _grad(ways + (self._late if early else []), wanted + [GradientEdge(leaf, 0) for leaf in early])
        finally:
            for hook in hooks:
                hook.remove()
        self._early = [(leaf, grad) for leaf, grad in zip(early, found[len(wanted) :], strict=True) if grad is not None]
        of_inputs = iter(found[: len(wanted)])
        return tuple(None if edge is None or not ways else next(of_inputs) for edge in self._inputs)

    def dw(self) -> None:
        """Accumulate the gradients of the parameters, as `Tensor.backward` does: hooks run, once for each parameter."""
        graph = self._taken_apart()
        self._graph = None
        # Smallest first: what is let go with each makes room for the gradients of the larger ones.
        for joint in sorted(graph.joints, key=graph.bytes_of):
            arrived = self._arrived.pop(joint, None)
            leaves = graph.leaves_of(joint)
            if arrived is not None and leaves:
                _accumulate(joint, arrived, leaves)
        late, self._late = self._late, []
        leaves = graph.leaves_below([edge.node for edge, _ in late])
        if leaves:
            edges = [GradientEdge(leaf, 0) for leaf in leaves]
            torch.autograd.backward([edge for edge, _ in late], [grad for _, grad in late], inputs=edges)
        early, self._early = self._early, []
        for leaf, grad in early:
            torch.autograd.backward([GradientEdge(leaf, 0)], [grad])
        self._roots, self._inputs = [], []

    @property
    def joints(self) -> frozenset[Node]:
        """The nodes that dw runs once more, until it has run."""
        return frozenset() if self._graph is None else frozenset(self._graph.joints)

    def leads_before(self, number: int) -> bool:
        """Whether the graph has nodes that this thread made before the node of a number."""
        return self._taken_apart().leads_before(number)

    def _taken_apart(self) -> _Graph:
        if self._graph is None:
            raise RuntimeError("This backward was finished: dw has run, and the graph is let go.")
        return self._graph

    def _keep(self, joint: Node) -> Any:
        def keep(grads: Grads) -> None:
            self._arrived[joint] = grads

        return keep


class _Graph:
    """What a walk over the nodes finds: the way to the inputs, and what joins it.

    Attributes:
        joints: nodes on the way at which parameters join that dw computes, outputs first.
        early: accumulators that dx computes and dw delivers.
    """

    def __init__(self, roots: list[GradientEdge], inputs: list[GradientEdge]) -> None:
        self._ends = {edge.node for edge in inputs}
        self._on_way: dict[Node, bool] = {}
        order = self._walk([edge.node for edge in roots])
        off_way = [edge.node for edge in roots if not self._on_way[edge.node]]
        self._leaves: dict[Node, tuple[Node, ...]] = {}
        sides = {node: self._side(node) for node in order if self._on_way[node] and node not in self._ends}
        found = {node: leaves for node, leaves in sides.items() if leaves}
        times: dict[Node, int] = {}
        for leaves in (*found.values(), self._below(off_way)):
            for leaf in leaves:
                times[leaf] = times.get(leaf, 0) + 1
        for node, leaves in found.items():
            if compat.is_python_function(node) and not _is_call(node):
                times.update(dict.fromkeys(leaves, 2))
        # A checkpointed call cuts its own backward: asked for its trigger it runs the second half of it, never before.
        triggers = {node.next_functions[0][0] for node in order if _is_call(node)}
        early = {leaf for leaf, count in times.items() if count > 1 and found} - triggers
        self._complete(early, triggers)
        self.early = [leaf for leaf in times if leaf in early]
        self._own = {node: [leaf for leaf in leaves if leaf not in early] for node, leaves in found.items()}
        self.joints = [node for node, leaves in self._own.items() if leaves]
        self._early = early

    def _complete(self, early: set[Node], triggers: set[Node | None]) -> None:
        """What is computed from parameters alone runs in dx or in dw, never in both: its leaves go together."""
        groups = [set(leaves) - triggers for leaves in self._leaves.values()]
        while mixed := [group for group in groups if group & early and not group <= early]:
            early.update(*mixed)

    def leads_before(self, number: int) -> bool:
        """Whether a node was made before the node of a number; leaves do not count."""
        return any(node.next_functions and compat.sequence_number(node) < number for node in self._on_way)

    def leads(self, node: Node) -> bool:
        """Whether a node leads to an input."""
        return self._on_way[node]

    def leaves_of(self, joint: Node) -> list[Node]:
        """The accumulators that dw computes at a joint."""
        return self._own[joint]

    def bytes_of(self, joint: Node) -> int:
        """What the gradients that dw computes at a joint take."""
        return sum(compat.variable_of(leaf).nbytes for leaf in self._own[joint])

    def leaves_below(self, nodes: list[Node]) -> list[Node]:
        """The accumulators that dw computes below nodes off the way."""
        return [leaf for leaf in self._below(nodes) if leaf not in self._early]

    def _walk(self, starts: list[Node]) -> list[Node]:
        """Find which nodes lead to an input; return all nodes, each before those it leads to."""
        finished: list[Node] = []
        waiting = [(node, False) for node in starts]
        while waiting:
            node, done = waiting.pop()
            if done:
                children = _children(node)
                self._on_way[node] = node in self._ends or any(self._on_way.get(child, False) for child in children)
                finished.append(node)
            elif node not in self._on_way:
                self._on_way[node] = False
                waiting.append((node, True))
                if node not in self._ends:
                    waiting += [(child, False) for child in _children(node) if child not in self._on_way]
        return finished[::-1]

    def _side(self, node: Node) -> tuple[Node, ...]:
        """The accumulators that a node on the way leads to by edges off the way."""
        return self._below([child for child in _children(node) if not self._on_way[child]])

    def _below(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """The accumulators below nodes off the way."""
        found: dict[Node, None] = {}
        for node in nodes:
            if node not in self._leaves:
                self._leaves[node] = self._find_below(node)
            found.update(dict.fromkeys(self._leaves[node]))
        return tuple(found)

    def _find_below(self, start: Node) -> tuple[Node, ...]:
        found: list[Node] = []
        seen, waiting = {start}, [start]
        while waiting:
            node = waiting.pop()
            if compat.is_accumulator(node):
                found.append(node)
            fresh = [child for child in _children(node) if child not in seen]
            seen.update(fresh)
            waiting += fresh
        return tuple(found)


def edges_of(tensors: Iterable[Any]) -> list[GradientEdge | None]:
    """The places of tensors in their graph; None for what needs no gradient."""
    return [_edge_of(tensor) for tensor in tensors]


def _edge_of(value: Any) -> GradientEdge | None:
    return get_gradient_edge(value) if isinstance(value, torch.Tensor) and value.requires_grad else None


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _is_call(node: Node) -> bool:
    """Whether a node cuts its own backward: that of a reentrant call, and of a SAVE region in one."""
    return isinstance(getattr(node, "frame", None), Frame) or getattr(node, "cuts_itself", False) is True


def _grad(roots: list[tuple[GradientEdge, torch.Tensor]], wanted: list[GradientEdge]) -> Grads:
    if not roots or not wanted:
        return (None,) * len(wanted)
    edges, grads = [edge for edge, _ in roots], [grad for _, grad in roots]
    return torch.autograd.grad(edges, wanted, grads, retain_graph=True, allow_unused=True)


def _accumulate(joint: Node, arrived: Grads, leaves: list[Node]) -> None:
    given = [(GradientEdge(joint, index), grad) for index, grad in enumerate(arrived) if grad is not None]
    # Hooks on the tensor that the joint made have seen this gradient in dx, and would change it, or what the tensor
    # retains of it, a second time: they get zeros, and the joint what arrived.
    hook = joint.register_prehook(lambda _: arrived)
    try:
        edges = [GradientEdge(leaf, 0) for leaf in leaves]
        torch.autograd.backward([edge for edge, _ in given], [_zeros_like(grad) for _, grad in given], inputs=edges)
    finally:
        hook.remove()


def _zeros_like(grad: torch.Tensor) -> torch.Tensor:
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return torch.zeros_like(grad)
    return grad.new_zeros(()).expand(grad.shape)  # takes no memory
