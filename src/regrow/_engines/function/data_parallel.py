"""Data parallelism: DDP reduces a gradient as soon as it is accumulated. Must never cost a call without it.

A call accumulates the gradients of what it captures by itself. A parameter that two calls capture, or one call and code
outside, is accumulated twice in one backward: DDP would add the second part after it had reduced the first, on each
rank its own. With ``static_graph`` it counts.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parallel import DistributedDataParallel

from regrow import errors
from regrow._core import compat
from regrow._core.faults import CheckpointError
from regrow._engines.function import _compat
from regrow._engines.function.graph import Graph

Around = ref[DistributedDataParallel]

# Of each wrapper: the backward that runs, and the parameters that calls have accumulated in it.
_done: WeakKeyDictionary[DistributedDataParallel, tuple[int, set[int]]] = WeakKeyDictionary()


def around() -> Around | None:
    """The wrapper whose forward runs, if it reduces and does not count."""
    wrapper = _compat.active_wrapper()
    if wrapper is None or wrapper.static_graph or not wrapper.require_backward_grad_sync:
        return None
    return ref(wrapper)


def refuse_shared(label: str, wrapper: Around, graph: Graph) -> None:
    """CheckpointError if what a call is about to accumulate is accumulated elsewhere in this backward, too."""
    here = wrapper()
    if here is None:
        return
    names = {id(parameter): name for name, parameter in here.module.named_parameters()}
    task = compat.graph_task_id()
    last, done = _done.get(here, (task, set()))
    if last != task:
        done = set()
    found: dict[int, torch.Tensor] = {}
    for node in graph.captured():
        parameter = compat.variable_of(node)
        if id(parameter) in names:
            found[id(parameter)] = parameter
            if id(parameter) in done or compat.is_wanted(node):
                says = errors.shared_under_ddp(label, names[id(parameter)])
                raise CheckpointError(says, label=label)
    _done[here] = task, done | set(found)
