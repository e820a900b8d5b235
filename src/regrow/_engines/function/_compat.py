"""The private names of torch that this engine alone needs, and why. Must never hold behaviour of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from regrow._core.compat import _private

# The engine without the checks around it: a reentrant call starts a backward of its own whenever one reaches it.
# Deleted if torch.autograd.backward becomes cheap.
_run_backward: Callable[..., Any] = _private(
    "torch.autograd.variable", "Variable._execution_engine.run_backward", "a replay's backward runs inside another"
)

# The node that backward runs now: what it alone has read can be let go. Deleted by a public current node.
running_node: Callable[[], Any] = _private("torch._C", "_current_autograd_node", "it tells who reads a saved tensor")

# Nodes are numbered on each thread: a smaller number than before a replay belongs to a graph outside it.
# Deleted by a public way to tell where a graph begins.
next_sequence_number: Callable[[], int] = _private(
    "torch._C._autograd", "_get_sequence_nr", "it tells the nodes of a replay from older ones"
)

# The DDP wrapper whose forward runs. Deleted by a public way to ask for it.
_ = _private("torch.nn.parallel", "DistributedDataParallel._active_ddp_module", "DDP reduces a gradient once")


def active_wrapper() -> DistributedDataParallel | None:
    """The DDP wrapper whose forward runs."""
    wrapper: DistributedDataParallel | None = DistributedDataParallel._active_ddp_module
    return wrapper


# What parametrize.cached() keeps: weights, with the graph, or without one, of whoever came first.
# Deleted by a cache that asks whether gradients are enabled.
_ = _private("torch.nn.utils.parametrize", "_cache", "a call without a graph leaves no cached weights to others")
_ = _private(
    "torch.nn.utils.parametrize", "_cache_enabled", "a call without a graph leaves no cached weights to others"
)


def caches_weights() -> bool:
    """Whether ``parametrize.cached()`` is open."""
    return parametrize._cache_enabled > 0


@contextmanager
def own_weights() -> Iterator[None]:
    """Cached weights of outside are not found inside, nor the other way round."""
    outside = dict(parametrize._cache)
    parametrize._cache.clear()
    try:
        yield
    finally:
        parametrize._cache.clear()
        parametrize._cache.update(outside)


# Function.apply without a look for torch.func transforms, which are none here. Deleted if that look becomes cheap.
_base: Any = _private("torch._C", "_FunctionBase", "every reentrant call makes one node")


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """How to apply a custom Function outside torch.func transforms."""
    apply: Callable[..., tuple[torch.Tensor, ...]] = _base.__dict__["apply"].__get__(None, function)
    return apply


def backward(roots: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor, ...]) -> None:
    """Accumulate gradients in the leaves. Roots and gradients must match: nothing is checked here."""
    _run_backward(roots, grads, False, False, (), True, True)  # allow what is unreachable, accumulate


def accumulator_of(leaf: torch.Tensor) -> Any:
    """The node that accumulates into a leaf, whoever asks."""
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(leaf).node
