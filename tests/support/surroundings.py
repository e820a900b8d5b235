"""Features of what surrounds a call and what it sees without being given it: modes, random numbers, hooks, state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import regrow
from tests.support.calls import grads, leaf, mlp
from tests.support.matrix import Call, feature

SURROUNDINGS = "Surroundings"


@feature(SURROUNDINGS, "`no_grad`", replays=0)
def no_grad(call: Call) -> Any:
    with torch.no_grad():
        return call(mlp(), leaf())


@feature(SURROUNDINGS, "`inference_mode`", replays=0)
def inference(call: Call) -> Any:
    with torch.inference_mode():
        return call(mlp(), torch.ones(3, 4)).clone()


@feature(SURROUNDINGS, "autocast to bfloat16 around, backward outside of it")
def autocast(call: Call) -> Any:
    net, x = mlp(), leaf()
    with torch.autocast("cpu", torch.bfloat16):
        out = call(lambda t: net(t).softmax(-1), x)
    out.float().sum().backward()
    return out.detach(), grads(x, net)


@feature(SURROUNDINGS, "autocast inside, with a part where it is off")
def autocast_inside(call: Call) -> Any:
    w, x = leaf(4, 4), leaf()

    def function(t):
        with torch.autocast("cpu", torch.bfloat16):
            y = t @ w
            with torch.autocast("cpu", enabled=False):
                y = y.float() @ w
            return (y @ w).float()

    call(function, x).sum().backward()
    return grads(x, w)


@feature(SURROUNDINGS, "`save_on_cpu` around")
def save_on_cpu(call: Call) -> Any:
    net, x = mlp(), leaf()
    with torch.autograd.graph.save_on_cpu():
        out = call(lambda t: net(t).sin(), x.cos()).exp()
    out.sum().backward()
    return grads(x, net)


@feature(SURROUNDINGS, "`save_on_cpu` inside")
def save_on_cpu_inside(call: Call) -> Any:
    x = leaf()

    def function(t):
        with torch.autograd.graph.save_on_cpu():
            y = t.sin().exp() * t
        return y.cos()

    call(function, x).sum().backward()
    return x.grad


class Doubled(TorchFunctionMode):
    """Every sine is twice as large."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


@feature(SURROUNDINGS, "a `TorchFunctionMode` around, backward outside of it")
def function_mode(call: Call) -> Any:
    x = leaf()
    with Doubled():
        out = call(lambda t: torch.sin(t).exp(), x)
    out.sum().backward()
    return x.grad


class Looking(TorchDispatchMode):
    """Sees every operator, and changes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@feature(SURROUNDINGS, "a `TorchDispatchMode` that looks on, around forward and backward")
def dispatch_mode(call: Call) -> Any:
    net, x = mlp(), leaf()
    with Looking():
        call(lambda t: net(t).sin(), x).sum().backward()
    return grads(x, net)


@feature(SURROUNDINGS, "default dtype, backward under another one")
def default_dtype(call: Call) -> Any:
    x = leaf(dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        out = call(lambda t: (t * torch.tensor(0.1) + torch.ones(4) / 3).sin(), x)
    finally:
        torch.set_default_dtype(torch.float32)
    out.sum().backward()
    return x.grad


@feature(SURROUNDINGS, "deterministic algorithms, backward without")
def deterministic(call: Call) -> Any:
    x, seen = leaf(), []

    def function(t):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return t.sin().exp()

    torch.use_deterministic_algorithms(True)
    try:
        out = call(function, x)
    finally:
        torch.use_deterministic_algorithms(False)
    out.sum().backward()
    return set(seen), x.grad


@feature(SURROUNDINGS, "a default device around (`with torch.device(...)`), backward outside of it")
def default_device(call: Call) -> Any:
    x = leaf(device="meta")
    with torch.device("meta"):
        out = call(lambda t: (t * torch.ones(4)).sin(), x)
    out.sum().backward()
    return x.grad.shape, x.grad.is_meta


_recipe = {"scale": 1.0}


@contextlib.contextmanager
def scaled(scale: float) -> Iterator[None]:
    outer, _recipe["scale"] = _recipe["scale"], scale
    try:
        yield
    finally:
        _recipe["scale"] = outer


@feature(SURROUNDINGS, "ambient state of your own (`register_ambient`)")
def ambient(call: Call) -> Any:
    x = leaf()
    unregister = regrow.register_ambient(lambda: _recipe["scale"], scaled)
    try:
        with scaled(4.0):
            out = call(lambda t: (t * _recipe["scale"]).sin(), x)
        out.sum().backward()
    finally:
        unregister()
    return x.grad


@feature(SURROUNDINGS, "`regrow.ledger` around")
def ledger(call: Call) -> Any:
    net, x = mlp(), leaf()
    with regrow.ledger():
        call(lambda t: net(t).sin(), x).sum().backward()
    return grads(x, net)


RANDOM = "Random numbers"


@feature(RANDOM, "dropout and noise, and the generator afterwards")
def dropout(call: Call) -> Any:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)), leaf()
    out = call(lambda t: (net(t) * torch.rand_like(t)).sin(), x)
    torch.randn(5)
    out.sum().backward()
    return grads(x, net), torch.get_rng_state()


@feature(RANDOM, "noise that its operator writes last (`rrelu`)")
def rrelu(call: Call) -> Any:
    x = leaf()
    call(lambda t: nn.functional.rrelu(t.sin(), 0.1, 0.4, training=True), x).sum().backward()
    return x.grad


@feature(RANDOM, "a `torch.Generator` of your own, captured or given")
def generators(call: Call) -> Any:
    x, mine, given = leaf(), torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

    def function(t, generator):
        return (t * torch.rand(4, generator=mine)).sin() * torch.rand(4, generator=generator)

    call(function, x, given).sum().backward()
    return x.grad, mine.get_state(), given.get_state()


@feature(RANDOM, "`preserve_rng_state=False`, without random numbers", options={"preserve_rng_state": False})
def not_preserved(call: Call) -> Any:
    net, x = mlp(), leaf()
    call(lambda t: net(t).sin(), x).sum().backward()
    return grads(x, net), torch.get_rng_state()


STATE = "State"


@feature(STATE, "running statistics of BatchNorm: moved once")
def batch_norm(call: Call) -> Any:
    net, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ELU()), leaf(5, 4)
    call(lambda t: net(t).sin(), x).sum().backward()
    return grads(x, net), list(net.buffers())


@feature(STATE, "a power iteration in forward (spectral norm): moved once")
def spectral_norm(call: Call) -> Any:
    layer, x = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), leaf()
    call(lambda t: layer(t).sin(), x).sum().backward()
    return grads(x, layer), list(layer.buffers())


@feature(STATE, "train and eval mode, switched between forward and backward")
def mode_switched(call: Call) -> Any:
    net, x = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6)), leaf(5, 4)
    loss = call(lambda t: net(t).sin(), x).sum()
    net.eval()
    loss.backward()
    return grads(x, net), net.training


@feature(STATE, "a parameter changed in place between forward and backward")
def parameter_changed(call: Call) -> Any:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    loss = call(lambda t: layer(t).sin(), x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    loss.backward()
    return grads(layer)


@feature(STATE, "a parameter that the replay does not read, changed between")
def other_parameter_changed(call: Call) -> Any:
    net, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), leaf()
    loss = call(lambda t: net[0](t).sin(), x).sum()
    with torch.no_grad():
        net[1].weight.mul_(2)
    loss.backward()
    return grads(x, net[0])


@feature(STATE, "a captured tensor changed in place between")
def captured_changed(call: Call) -> Any:
    x, shift = leaf(), torch.ones(3, 4)
    loss = call(lambda t: (t + shift).sin(), x).sum()
    shift.mul_(2)
    loss.backward()
    return x.grad


SHIFT = torch.ones(4)


@feature(STATE, "a global that stands for another tensor by then")
def global_rebound(call: Call) -> Any:
    global SHIFT
    x = leaf()
    loss = call(lambda t: (t + SHIFT).sin(), x).sum()
    SHIFT = SHIFT + 1
    loss.backward()
    SHIFT = torch.ones(4)
    return x.grad


@feature(STATE, "a variable of the closure that a loop sets anew", replays=3)
def closure_in_a_loop(call: Call) -> Any:
    layers, x = [nn.Linear(4, 4) for _ in range(3)], leaf()
    h = x
    for layer in layers:
        h = call(lambda t: layer(t).sin(), h)  # noqa: B023 - it is what the row is about
    h.sum().backward()
    return grads(x, *layers)


@feature(STATE, "a tensor with a graph that the function leaves in an argument")
def leaves_a_graph(call: Call) -> Any:
    x, kept = leaf(), []

    def function(t, kept):
        if not kept:
            kept.append(t.sin())
        return t.cos().exp()

    loss = call(function, x, kept).sum()
    (loss + kept[0].sum()).backward()
    return x.grad
