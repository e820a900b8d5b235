"""Features of wrappers, of torch.compile, and of torch.func."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import nn
from torch._dynamo.compiled_autograd import _enable as compiled_autograd
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

import regrow
from tests.support.calls import grads, leaf, mlp
from tests.support.matrix import Call, Tick, feature

WRAPPERS = "Wrappers"


class Block(nn.Module):
    """A residual block that counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.tick = mlp(), Tick()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(self.tick(x))


def wrapped(call: Call) -> nn.Module:
    model = nn.Sequential(Block(), Block())
    call.apply(model, Block)
    return model


def trained(model: nn.Module) -> Any:
    x = leaf()
    model(x).square().sum().backward()
    return list(model.state_dict()), grads(x, model)


@feature(WRAPPERS, "`apply_checkpointing`", replays=2)
def applied(call: Call) -> Any:
    return trained(wrapped(call))


@feature(WRAPPERS, "a deep copy of a wrapped model", replays=2)
def copied(call: Call) -> Any:
    return trained(copy.deepcopy(wrapped(call)))


@feature(WRAPPERS, "a pickle of a wrapped model", replays=2)
def pickled(call: Call) -> Any:
    return trained(pickle.loads(pickle.dumps(wrapped(call))))


@feature(WRAPPERS, "torch's own `checkpoint_wrapper` with `checkpoint_fn=regrow.checkpoint`")
def torch_wrapper(call: Call) -> Any:
    block, x = Block(), leaf()
    model: nn.Module = block
    if call.engine is not None:
        # torch's wrapper hands options on only with NO_REENTRANT; which engine it is, they say.
        options = {"checkpoint_fn": regrow.checkpoint, "use_reentrant": call.engine.use_reentrant}
        model = torchs.CheckpointWrapper(block, torchs.CheckpointImpl.NO_REENTRANT, **options)
    model(x).square().sum().backward()
    return grads(x, block)


COMPILE = "torch.compile and export"


def compiled(call: Call, backend: str) -> Any:
    torch._dynamo.reset()
    net, x = mlp(), leaf()

    @torch.compile(backend=backend, fullgraph=True)
    def step(t):
        return call.bare(lambda u: net(u).sin(), t.cos()).exp()

    step(x).sum().backward()
    torch._dynamo.reset()
    return grads(x, net)


@feature(COMPILE, 'the call inside a compiled function, backend "eager"', replays=None)
def compiled_eager(call: Call) -> Any:
    return compiled(call, "eager")


@feature(COMPILE, 'the call inside a compiled function, backend "aot_eager"', replays=None)
def compiled_aot(call: Call) -> Any:
    return compiled(call, "aot_eager")


@feature(COMPILE, "a compiled function inside the call")
def compiled_inside(call: Call) -> Any:
    torch._dynamo.reset()
    net, x = mlp(), leaf()
    inner = torch.compile(lambda t: net(t).sin(), backend="eager")
    call(lambda t: inner(t).exp(), x).sum().backward()
    torch._dynamo.reset()
    return grads(x, net)


@feature(COMPILE, "compiled autograd around backward")
def autograd_compiled(call: Call) -> Any:
    torch._dynamo.reset()
    x = leaf()
    out = call(lambda t: t.sin().exp().tanh(), x)
    with compiled_autograd(torch.compile(backend="eager")):
        out.sum().backward()
    torch._dynamo.reset()
    return x.grad


@feature(COMPILE, "`torch.export` of a module that makes the call", replays=None)
def exported(call: Call) -> Any:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call.bare(lambda t: t.sin().exp(), x)

    x = torch.randn(3)
    return torch.export.export(Net(), (x,)).module()(x)


@feature(COMPILE, "a scheduling verb inside a compiled function", replays=None)
def scheduled_inside(call: Call) -> Any:
    x = leaf()
    if call.plain:
        return x.sin().detach()

    @torch.compile(backend="eager")
    def step(t):
        with regrow.recompute_handle_collector_ctx():
            return call.bare(torch.sin, t)

    return step(x).detach()


TRANSFORMS = "torch.func and forward mode"


@feature(TRANSFORMS, "`torch.func.grad` around", replays=0)
def grad_around(call: Call) -> Any:
    return torch.func.grad(lambda t: call(lambda u: u.sin().exp(), t).sum())(torch.randn(3))


@feature(TRANSFORMS, "`torch.func.vmap` around", replays=0)
def vmap_around(call: Call) -> Any:
    x = leaf()
    torch.func.vmap(lambda t: call(lambda u: u.sin().exp(), t))(x).sum().backward()
    return x.grad


@feature(TRANSFORMS, "`torch.func.jvp` around", replays=0)
def jvp_around(call: Call) -> Any:
    x = torch.randn(3)
    return torch.func.jvp(lambda t: call(lambda u: u.sin().exp(), t), (x,), (torch.ones(3),))


@feature(TRANSFORMS, "forward mode (`forward_ad`) around forward and backward")
def forward_mode(call: Call) -> Any:
    x = leaf(3)
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(call(lambda t: t.sin().exp(), forward_ad.make_dual(x, torch.ones(3))))
        value.sum().backward()
    return None if tangent is None else tangent.detach(), x.grad


@feature(TRANSFORMS, "forward mode around forward, and backward after it")
def forward_mode_left(call: Call) -> Any:
    x = leaf(3)
    with forward_ad.dual_level():
        value, _ = forward_ad.unpack_dual(call(lambda t: t.sin().exp(), forward_ad.make_dual(x, torch.ones(3))))
    value.sum().backward()
    return x.grad


@feature(TRANSFORMS, "`vmap` inside")
def vmap_inside(call: Call) -> Any:
    x, w = leaf(), leaf(4)
    call(lambda t: torch.func.vmap(lambda row: (row * w).sin().softmax(0) @ row)(t).exp(), x).sum().backward()
    return grads(x, w)


@feature(TRANSFORMS, "`torch.func.grad` inside")
def func_grad_inside(call: Call) -> Any:
    x = leaf(3)
    call(lambda t: torch.func.grad(lambda u: u.sin().sum())(t) * t.exp(), x).sum().backward()
    return x.grad


@feature(TRANSFORMS, "`functional_call` around a module that makes the call")
def functional_around(call: Call) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(lambda t: self.lin(t).tanh(), x)

    weight, x = torch.eye(2).requires_grad_(), leaf(1, 2)
    torch.func.functional_call(Net(), {"lin.weight": weight}, (x,)).sum().backward()
    return grads(x, weight)


@feature(TRANSFORMS, "`functional_call` around, with a weight that was computed")
def functional_around_computed(call: Call) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(lambda t: self.lin(t).tanh(), x)

    weight, x = torch.eye(2).requires_grad_(), leaf(1, 2)
    torch.func.functional_call(Net(), {"lin.weight": weight.exp()}, (x,)).sum().backward()
    return grads(x, weight)


@feature(TRANSFORMS, "`functional_call` inside")
def functional_inside(call: Call) -> Any:
    net, weight, x = nn.Linear(2, 2, bias=False), torch.eye(2).requires_grad_(), leaf(1, 2)

    def function(t, w):
        return torch.func.functional_call(net, {"weight": w}, (t,)).tanh().exp()

    call(function, x, weight).sum().backward()
    return grads(x, weight)
