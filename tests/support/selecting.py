"""Features of what is kept: policies, contexts, checks, SAVE regions."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torchs

import regrow
from regrow import policies
from tests.support.calls import grads, leaf, mlp
from tests.support.matrix import Call, feature

MM = torch.ops.aten.mm.default
SELECTIVE = "Selective checkpointing, contexts, checks"


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is MM


def two_products(call: Call, *, n_backwards: int = 1) -> Any:
    x, w = leaf(), leaf(4, 4)
    loss = call(lambda t: torch.dropout((t @ w).tanh(), 0.5, True) @ w, x).sin().sum()
    for index in range(n_backwards):
        loss.backward(retain_graph=index < n_backwards - 1)
    return grads(x, w), torch.get_rng_state()


@feature(SELECTIVE, "a policy as a function", options={"policy_fn": keep_products})
def policy_function(call: Call) -> Any:
    return two_products(call)


KEEP = policies.keep_matmuls(every=2) | policies.keep_random()


@feature(SELECTIVE, "a value of `regrow.policies` that counts, combined with another", options={"policy_fn": KEEP})
def policy_value(call: Call) -> Any:
    return two_products(call)


@feature(SELECTIVE, "a policy, and backward twice", replays=2, options={"policy_fn": keep_products})
def policy_twice(call: Call) -> Any:
    return two_products(call, n_backwards=2)


@feature(SELECTIVE, "a policy, and `save_on_cpu` around", options={"policy_fn": keep_products})
def policy_offloaded(call: Call) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return two_products(call)


@feature(
    SELECTIVE,
    "the same with `respect_saved_tensors_hooks=True`",
    options={"policy_fn": keep_products, "respect_saved_tensors_hooks": True},
)
def policy_respecting(call: Call) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return two_products(call)


@feature(
    SELECTIVE,
    "the same with `respect_saved_tensors_hooks=False`",
    options={"policy_fn": keep_products, "respect_saved_tensors_hooks": False},
)
def policy_not_offloaded(call: Call) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return two_products(call)


@feature(
    SELECTIVE,
    "`context_fn`: `regrow.create_selective_checkpoint_contexts`",
    options={"context_fn": partial(regrow.create_selective_checkpoint_contexts, [MM])},
)
def contexts(call: Call) -> Any:
    return two_products(call)


@feature(
    SELECTIVE,
    "`context_fn`: torch's own `create_selective_checkpoint_contexts`",
    options={"context_fn": partial(torchs.create_selective_checkpoint_contexts, [MM])},
)
def torch_contexts(call: Call) -> Any:
    return two_products(call)


@feature(
    SELECTIVE,
    "`context_fn`: contexts of your own",
    options={"context_fn": lambda: (nullcontext(), nullcontext())},
)
def own_contexts(call: Call) -> Any:
    return two_products(call)


@feature(SELECTIVE, "`debug=True`", options={"debug": True})
def debug(call: Call) -> Any:
    return two_products(call)


@feature(SELECTIVE, '`determinism_check="none"`', options={"determinism_check": "none"})
def unchecked(call: Call) -> Any:
    return two_products(call)


@feature(SELECTIVE, '`determinism_check="values"`', options={"determinism_check": "values"})
def values(call: Call) -> Any:
    return two_products(call)


@feature(SELECTIVE, '`determinism_check="sample"`', options={"determinism_check": "sample"})
def sample(call: Call) -> Any:
    return two_products(call)


REGIONS = "SAVE regions"


@feature(REGIONS, "`save_region`, run once")
def region(call: Call) -> Any:
    x, inside = leaf(), [0]

    def product(a, b):
        inside[0] += 1
        return torch.dropout(a * b, 0.5, True)

    call(lambda t: regrow.save_region(product, t.sin(), t.cos()).exp(), x).sum().backward()
    return inside, x.grad, torch.get_rng_state()


@feature(REGIONS, "a module as a region, with parameters and buffers")
def region_module(call: Call) -> Any:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()), leaf()
    regrow.checkpoint_exclude_wrapper(net[1])
    call(lambda t: net(t).exp(), x).sum().backward()
    return grads(x, net), list(net.buffers())


@feature(REGIONS, "`save_output=False`, from one region into another")
def region_not_kept(call: Call) -> Any:
    x = leaf()
    route = regrow.checkpoint_exclude_wrapper(torch.exp, save_output=False)
    call(lambda t: regrow.save_region(torch.sin, route(t.tanh()).view(-1)).cos(), x).sum().backward()
    return x.grad


@feature(REGIONS, "a region, and backward twice", replays=2)
def region_twice(call: Call) -> Any:
    x = leaf()
    loss = call(lambda t: regrow.save_region(torch.exp, t.sin()).cos(), x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad


@feature(REGIONS, "a region whose output is overwritten")
def region_overwritten(call: Call) -> Any:
    x = leaf()
    call(lambda t: regrow.save_region(torch.sin, t.tanh()).mul_(2).exp(), x).sum().backward()
    return x.grad


@feature(REGIONS, "a region and a policy", options={"policy_fn": keep_products})
def region_and_policy(call: Call) -> Any:
    net, x = mlp(), leaf()
    call(lambda t: net(regrow.save_region(torch.exp, t.sin())).cos(), x).sum().backward()
    return grads(x, net)
