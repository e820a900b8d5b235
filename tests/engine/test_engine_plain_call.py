"""Where nothing is recorded, a checkpointed call is the plain call; where nothing was saved, nothing runs again."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from regrow import recompute_handle_collector_ctx

OFF = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("mode", OFF)
def test_without_recording_the_call_is_plain(engine, counted, mode):
    """Rule 2: no frame, no handle, one execution, the plain result."""
    x, region = torch.randn(3, requires_grad=True), counted(torch.exp)
    with OFF[mode](), recompute_handle_collector_ctx() as handles:
        out = engine.checkpoint(region, x)
    assert (region.runs, handles, out.requires_grad, out.is_inference()) == (1, [], False, mode == "inference_mode")
    assert torch.equal(out, x.detach().exp())


def test_where_nothing_needs_a_gradient_there_is_no_handle(engine):
    """Rule 2: inputs and parameters without gradient leave nothing behind."""
    frozen = nn.Linear(3, 3).requires_grad_(False)
    with recompute_handle_collector_ctx() as handles:
        out = engine.checkpoint(frozen, torch.randn(2, 3))
    assert (handles, out.requires_grad) == ([], False)


@pytest.mark.only("hooks", because="the other engine replays whenever backward comes by")
def test_a_function_that_turns_recording_off_inside_leaves_no_handle(engine):
    """Rule 2: what counts is what was recorded, not what was asked."""
    with recompute_handle_collector_ctx() as handles:
        out = engine.checkpoint(torch.no_grad()(torch.exp), torch.randn(3, requires_grad=True))
    assert (handles, out.requires_grad) == ([], False)


@pytest.mark.only("hooks", because="the other engine replays whenever backward comes by")
@pytest.mark.parametrize(
    "region",
    [lambda t: t + 1, lambda t: t.view(-1), lambda t: t.sum(0), lambda t: t.clone().transpose(0, 1), lambda t: t],
    ids=["add", "view", "sum", "clone", "identity"],
)
def test_backward_that_needs_no_saved_tensor_replays_nothing(engine, counted, region):
    """Rule 2: the count of executions stays at one."""
    x, region = torch.randn(2, 3, requires_grad=True), counted(region)
    engine.checkpoint(region, x).sum().backward()
    assert region.runs == 1
    assert torch.equal(x.grad, torch.ones(2, 3))


@pytest.mark.only("hooks", because="the other engine replays whenever backward comes by")
def test_a_part_of_backward_that_needs_no_saved_tensor_replays_nothing(engine, counted):
    """Rule 2: only a read replays; the branch that was asked for reads nothing."""
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    region = counted(lambda a, b: (a + 1, b.exp()))
    shifted, _grown = engine.checkpoint(region, x, y)
    shifted.sum().backward()
    assert region.runs == 1


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda t: f(t).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda t: f(t).sum()))(x),
}


# Forward-mode differentiation in torch still compiles scripts.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_func_transforms_see_the_plain_call(same_grads, transform):
    """Rule 2: under torch.func the call is plain, and right."""

    def program(call):
        w = torch.randn(3, 3)
        return TRANSFORMS[transform](lambda t: call(lambda u: torch.tanh(u @ w), t), torch.randn(3, 3))

    same_grads(program)


@pytest.mark.only("hooks", because="backward of the other engine is not vmapped")
def test_a_vmapped_backward_of_a_checkpointed_call_is_right(same_grads):
    """Rule 1: the transform surrounds backward alone; forward left a frame, and its replay is batched."""

    def program(call):
        x = torch.linspace(0.1, 1, 4).requires_grad_()
        out = call(lambda t: t.sin().exp().tanh(), x)
        return torch.func.vmap(lambda v: torch.autograd.grad(out, x, v)[0])(torch.eye(4))

    same_grads(program)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_a_vmapped_backward_of_nested_calls_is_right(same_grads):
    """Rule 1: a nested call in the replay must be what it was in forward, or its tensors land in the wrong places."""

    def program(call):
        x = torch.linspace(0.1, 1, 4).requires_grad_()
        out = call(lambda t: call(lambda u: u.exp().tanh(), t.sin()).cos(), x)
        return torch.func.vmap(lambda v: torch.autograd.grad(out, x, v)[0])(torch.eye(4))

    same_grads(program)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
@pytest.mark.parametrize("batched", [True, False])
def test_gradients_for_a_batch_of_cotangents(same_grads, batched):
    """Rule 1: ``is_grads_batched`` replays under a batching mode, nested calls included."""

    def program(call):
        x = torch.linspace(0.1, 1, 4).requires_grad_()
        out = call(lambda t: call(lambda u: u.exp().tanh(), t.sin()).cos(), x)
        if batched:
            return torch.autograd.grad(out, x, torch.eye(4), is_grads_batched=True)[0]
        return torch.stack([torch.autograd.grad(out, x, row, retain_graph=True)[0] for row in torch.eye(4)])

    same_grads(program)


@pytest.mark.parametrize("surround", [nullcontext, torch.no_grad], ids=["plain", "no_grad"])
def test_backward_may_be_started_under_no_grad(same_grads, surround):
    """Rule 3: the replay records whatever mode backward is started in."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        out = call(lambda t: t.sin().exp(), x).sum()
        with surround():
            out.backward()
        return x.grad

    same_grads(program)


def test_inference_tensors_that_are_only_added_may_be_inputs(same_grads):
    """Rule 1: the plain call saves no inference tensor here, so the checkpoint does not need to either."""

    def program(call):
        with torch.inference_mode():
            shift = torch.ones(3)
        x = torch.randn(3, requires_grad=True)
        call(lambda t, s: (t + s).sin(), x, shift).sum().backward()
        return x.grad

    same_grads(program)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_transforms_inside_the_function(same_grads, transform):
    """Rule 1: those that torch allows under hooks, with a nested call inside them."""

    def program(call):
        x = torch.randn(2, 3, requires_grad=True)

        def function(t):
            inner = lambda u: call(lambda v: v.sin().exp(), u).cos()  # noqa: E731
            if transform == "vmap":
                return torch.func.vmap(inner)(t).tanh()
            return torch.func.jvp(inner, (t,), (torch.ones(2, 3),))[1] * t.exp()

        call(function, x).sum().backward()
        return x.grad

    same_grads(program)
