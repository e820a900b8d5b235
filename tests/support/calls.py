"""Features of a call and of its backward: arguments, outputs, kinds of backward, hooks, nesting, writes in place."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from tests.conftest import run_on_thread
from tests.support.matrix import Call, feature, tick


def leaf(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape or (3, 4), **options).requires_grad_()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def grads(*owners: Any) -> list[Any]:
    """Gradients of tensors and of modules' parameters."""
    found = []
    for owner in owners:
        found += [p.grad for p in owner.parameters()] if isinstance(owner, nn.Module) else [owner.grad]
    return found


ARGUMENTS = "Arguments and outputs"


@feature(ARGUMENTS, "containers, keywords, None and plain values in arguments and outputs")
def containers(call: Call) -> Any:
    x, y, z = leaf(), leaf(), leaf()

    def function(first, rest, *, table, scale=1.0, flag=None):
        made = first * rest[0].sin() + scale * rest[1][0].exp() * table["z"]
        return {"ordered": OrderedDict(a=made.cos(), b=[made.exp(), None]), "number": 3, "text": "text"}

    out = call(function, x, [y, (z, None)], table={"z": z}, scale=2.5)
    (out["ordered"]["a"] + out["ordered"]["b"][0]).sum().backward()
    return out["ordered"]["a"].detach(), out["ordered"]["b"][1], out["number"], out["text"], grads(x, y, z)


@feature(ARGUMENTS, "integers and booleans among tensors that go in and out")
def integers(call: Call) -> Any:
    x, rows, mask = leaf(5, 4), torch.tensor([3, 0, 3]), torch.tensor([True, False, True, True])

    def function(t, rows, mask):
        picked = t[rows].sin()[:, mask]
        return picked.exp(), picked.argmax(1), picked > 0

    out, places, positive = call(function, x, rows, mask)
    out.sum().backward()
    return out.detach(), places, positive, x.grad


@feature(ARGUMENTS, "inputs without a gradient, parameters that the function captures")
def captured(call: Call) -> Any:
    net, x = mlp(), torch.randn(3, 4)
    call(lambda t: net(t).sin(), x).sum().backward()
    return grads(net)


@feature(ARGUMENTS, "a module as the function")
def module(call: Call) -> Any:
    net, x = mlp(), leaf()
    net.register_forward_pre_hook(lambda *_: tick())
    call.bare(net, x).sum().backward()
    return grads(x, net)


@feature(ARGUMENTS, "frozen parameters")
def frozen(call: Call) -> Any:
    net, x = mlp(), leaf()
    net[0].requires_grad_(False)
    net[2].bias.requires_grad_(False)
    call(lambda t: net(t).sin(), x).sum().backward()
    return grads(x, net)


@feature(ARGUMENTS, "one tensor given twice")
def twice(call: Call) -> Any:
    x = leaf()
    call(lambda a, b, *, c: (a * b).sin() * c.exp(), x, x, c=x).sum().backward()
    return x.grad


@feature(ARGUMENTS, "an input returned, and a view of one")
def input_returned(call: Call) -> Any:
    x = leaf(4, 4)
    same, view, other = call(lambda t: (t, t[1:3], t.exp()), x)
    (same.sum() + view.sin().sum() + other.sum()).backward()
    return x.grad


@feature(ARGUMENTS, "a tensor with a graph that the function captures")
def captures_a_graph(call: Call) -> Any:
    x, y = leaf(), leaf()
    outside = y.sin()
    call(lambda t: (t * outside).exp(), x).sum().backward()
    return grads(x, y)


@feature(ARGUMENTS, "no tensor in the output", replays=0)
def no_output(call: Call) -> Any:
    return call(lambda t: None, leaf())


@feature(ARGUMENTS, "tensors in an output that is no container of torch's pytree")
def opaque_output(call: Call) -> Any:
    class Record:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    x = leaf()
    call(lambda t: Record(t.sin().exp()), x).value.sum().backward()
    return x.grad


@feature(ARGUMENTS, "`early_stop=False`", options={"early_stop": False})
def whole_replay(call: Call) -> Any:
    x = leaf()
    call(lambda t: t.sin().exp() + 1, x).sum().backward()
    return x.grad


BACKWARD = "Backward"


@feature(BACKWARD, "from some of several outputs")
def some_outputs(call: Call) -> Any:
    x, y = leaf(), leaf()
    first, _ = call(lambda a, b: ((a * b).sin(), b.exp().cos()), x, y)
    first.sum().backward()
    return grads(x, y)


@feature(BACKWARD, "`autograd.grad` for inputs, where nothing is captured")
def partial_inputs(call: Call) -> Any:
    x, y = leaf(), leaf()
    return torch.autograd.grad(call(lambda a, b: (a * b).sin().exp(), x, y).sum(), [x])


@feature(BACKWARD, "`autograd.grad` for inputs, with captured parameters")
def partial_with_captured(call: Call) -> Any:
    net, x = mlp(), leaf()
    return torch.autograd.grad(call(lambda t: net(t).sin(), x).sum(), [x])


@feature(BACKWARD, "`autograd.grad` for captured parameters")
def partial_captured(call: Call) -> Any:
    net, x = mlp(), leaf()
    return torch.autograd.grad(call(lambda t: net(t).sin(), x).sum(), list(net.parameters()))


@feature(BACKWARD, "`backward(inputs=[...])` with captured parameters")
def limited(call: Call) -> Any:
    net, x = mlp(), leaf()
    call(lambda t: net(t).sin(), x).sum().backward(inputs=[x])
    return grads(x, net)


@feature(BACKWARD, "`retain_graph=True`, twice", replays=2)
def retained(call: Call) -> Any:
    net, x = mlp(), leaf()
    loss = call(lambda t: net(t).sin(), x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(x, net)


@feature(BACKWARD, "of second order (`create_graph=True`)", replays=2)
def second_order(call: Call) -> Any:
    net, x = mlp(), leaf()
    (first,) = torch.autograd.grad(call(lambda t: net(t).sin(), x).sum(), x, create_graph=True)
    first.square().sum().backward()
    return first.detach(), grads(x, net)


@feature(BACKWARD, "batched (`is_grads_batched=True`)")
def batched(call: Call) -> Any:
    x = leaf(4)
    return torch.autograd.grad(call(lambda t: t.exp().tanh(), x), x, torch.eye(4), is_grads_batched=True)


@feature(BACKWARD, "again after one that raised", replays=2)
def after_an_error(call: Call) -> Any:
    x, raising = leaf(), [True]

    def fail(grad: torch.Tensor) -> None:
        if raising.pop():
            raise ZeroDivisionError

    hidden = x.sin()
    hidden.register_hook(fail)
    loss = call(lambda t: t.sin().exp(), hidden).sum()
    try:
        loss.backward(retain_graph=True)
    except ZeroDivisionError:
        raising.append(False)
    loss.backward()
    return x.grad


@feature(BACKWARD, "of nothing: the output is dropped", replays=0)
def dropped(call: Call) -> Any:
    return call(lambda t: t.sin().exp(), leaf()).detach()


@feature(BACKWARD, "that needs no saved tensor", replays={"hooks": 0, "reentrant": 1})
def linear(call: Call) -> Any:
    x, y = leaf(), leaf()
    call(lambda a, b: (a + b).t() - 1, x, y).sum().backward()
    return grads(x, y)


@feature(BACKWARD, "on another thread")
def threaded(call: Call) -> Any:
    net, x = mlp(), leaf()
    loss = call(lambda t: net(t).sin(), x).sum()
    run_on_thread(loss.backward)
    return grads(x, net)


@feature(BACKWARD, "`autograd.grad` inside the function, with a graph", replays=2)
def grad_inside(call: Call) -> Any:
    x, w = leaf(), leaf()

    def function(t):
        energy = (t.sin() * w).exp().sum()
        (force,) = torch.autograd.grad(energy, t, create_graph=True)
        return force * w.tanh()

    call(function, x).sum().backward()
    return grads(x, w)


@feature(BACKWARD, "`backward()` inside the function, of a graph of its own", replays={"hooks": 2, "reentrant": 1})
def backward_inside(call: Call) -> Any:
    x, w = leaf(), leaf()

    def function(t):
        inner = t.detach().requires_grad_()
        with torch.enable_grad():
            (inner.sin() * inner.exp()).sum().backward()
        return (t * w).cos() * inner.grad

    call(function, x).sum().backward()
    return grads(x, w)


@feature(BACKWARD, "a parameter in two calls", replays=2)
def shared(call: Call) -> Any:
    net, x = mlp(), leaf()
    call(lambda t: net(t).sin(), call(lambda t: net(t).cos(), x)).sum().backward()
    return grads(x, net)


HOOKS = "Hooks"


@feature(HOOKS, "on a tensor inside the function")
def hook_inside(call: Call) -> Any:
    x = leaf()

    def function(t):
        y = t.sin()
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 2)
        return y.exp()

    call(function, x).sum().backward()
    return x.grad


@feature(HOOKS, "that the function puts on its input")
def hook_on_the_input_inside(call: Call) -> Any:
    x = leaf()

    def function(t):
        t.register_hook(lambda grad: grad * 3)
        return t.sin().exp()

    call(function, x * 1).sum().backward()
    return x.grad


@feature(HOOKS, "on the input and the output of the call")
def hook_outside(call: Call) -> Any:
    x, seen = leaf(), []
    hidden = x.sin()
    hidden.register_hook(lambda grad: seen.append("input"))
    out = call(lambda t: t.exp().tanh(), hidden)
    out.register_hook(lambda grad: grad * 2)
    out.sum().backward()
    return seen, x.grad


@feature(HOOKS, "on captured parameters, before and after accumulation")
def parameter_hooks(call: Call) -> Any:
    net, x, seen = mlp(), leaf(), []
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: grad * 2)
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    call(lambda t: net(t).sin(), x).sum().backward()
    return len(seen), grads(x, net)


@feature(
    HOOKS,
    "on captured parameters of two calls",
    replays=2,
    but={"reentrant": ("the hooks run once for each of the two calls", lambda want: (2 * want[0], want[1]))},
)
def parameter_hooks_twice(call: Call) -> Any:
    net, x, seen = mlp(), leaf(), []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    call(lambda t: net(t).sin(), call(lambda t: net(t).cos(), x)).sum().backward()
    return len(seen), grads(x, net)


@feature(HOOKS, "full backward hooks of a module inside")
def module_hooks(call: Call) -> Any:
    net, x, seen = mlp(), leaf(), []
    net[1].register_full_backward_hook(lambda module, into, out: seen.append(into[0].clone()))
    call(lambda t: net(t).sin(), x).sum().backward()
    return seen, grads(x, net)


NESTING = "Checkpoints in checkpoints"


def nest(outer: Call, inner: Call) -> Any:
    x, weights = leaf(), [leaf(4, 4), leaf(4, 4)]

    def layer(t, weight):
        return (t @ weight).sin().cos()

    def pair(t):
        return inner(layer, inner(layer, t, weights[0]), weights[1])

    outer(pair, x).sum().backward()
    return grads(x, *weights)


@feature(NESTING, "the same engine inside", replays=4)
def nested(call: Call) -> Any:
    return nest(call, call)


@feature(NESTING, "the other engine inside", replays={"hooks": 4, "reentrant": 5})
def other_inside(call: Call) -> Any:
    return nest(call, call.other)


IN_PLACE = "Writes in place"


@feature(IN_PLACE, "into a tensor made inside")
def in_place_inside(call: Call) -> Any:
    x = leaf()

    def function(t):
        y = t.clone()
        y.mul_(2).add_(t)
        y[1] = y[0].clone() * t[2]
        return nn.functional.relu(y.sigmoid_() + y, inplace=True) + 1

    call(function, x).sum().backward()
    return x.grad


@feature(IN_PLACE, "through views of a tensor made inside")
def in_place_views(call: Call) -> Any:
    x = leaf(4, 4)

    def function(t):
        y = t * 1
        y.diagonal().mul_(t.sum())
        y.view(2, 8).narrow(1, 0, 4).add_(t[2].exp())
        y.t()[0].copy_(t[0].sin())
        return y.unfold(0, 2, 1).cos()

    call(function, x).sum().backward()
    return x.grad


@feature(IN_PLACE, "into an input that needs no gradient")
def in_place_input(call: Call) -> Any:
    x, state = leaf(), torch.ones(3, 4)
    call(lambda t, s: (t * s.add_(1)).sin(), x, state).sum().backward()
    return x.grad, state


@feature(IN_PLACE, "into an input that needs a gradient")
def in_place_grad_input(call: Call) -> Any:
    x = leaf()
    call(lambda t: t.mul_(2).sin(), x.cos() * 1).sum().backward()
    return x.grad


@feature(IN_PLACE, "into an input, between forward and backward")
def input_changed(call: Call) -> Any:
    x, shift = leaf(), torch.ones(3, 4)
    loss = call(lambda t, s: (t + s).sin(), x, shift).sum()
    shift.add_(1)
    loss.backward()
    return x.grad


@feature(IN_PLACE, "into the output of the call")
def output_changed(call: Call) -> Any:
    x = leaf()
    out = call(lambda t: t.exp().sin(), x)
    out.mul_(2)
    out.sum().backward()
    return x.grad
