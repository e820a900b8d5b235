"""In-place operators and views: the right gradient, or a refusal where plain autograd refuses too."""

import pytest
import torch

from regrow import (
    CheckpointError,
    InputChangedError,
    ValueChangedError,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)

RIGHT = {
    "activation in place": lambda x, w: (x @ w).relu_().sin(),
    "chain of them": lambda x, w: (x @ w).mul_(2).add_(1).sigmoid_().exp(),
    "row of a result": lambda x, w: assign(x @ w, lambda y: y[0].mul_(3)).sin(),
    "copy into a slice": lambda x, w: assign(x * 1, lambda y: y[1:].copy_(w[1:3])).exp(),
    "index put": lambda x, w: assign(x * 1, lambda y: y.__setitem__((slice(None), 1), w[0, 0])).exp(),
    "accumulate in a buffer": lambda x, w: torch.zeros(3, 4).addmm_(x, w).sin(),
    "view of a view": lambda x, w: assign(x @ w, lambda y: y.view(2, 6)[1, 2:4].neg_()).sin(),
    "transposed in place": lambda x, w: (x @ w).t_().sin(),
    "masked fill": lambda x, w: (x @ w).masked_fill_(x > 0, 0.5).exp(),
    "out of a split": lambda x, w: assign(x @ w, lambda y: y.unsafe_chunk(2, 1)[0].mul_(2)).cos(),
    "captured and doubled": lambda x, w: assign(x.clone(), lambda y: y.mul_(y.detach().clone())).sin(),
    "dropout in place": lambda x, w: torch.dropout_(x @ w, 0.4, True).sin(),
    "requires_grad turned on": lambda x, w: (x.detach().clone().requires_grad_() * w[:3]).sin() + x,
}


def assign(tensor, change):
    change(tensor)
    return tensor


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("kind", RIGHT)
def test_in_place_operators_inside(same_grads, kind, early_stop):
    """Rule 1: what plain autograd differentiates, the checkpoint differentiates."""

    def program(call):
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        out = call(RIGHT[kind], x, w)
        out.square().sum().backward()
        return out.detach(), x.grad, w.grad

    same_grads(program, early_stop=early_stop)


def overwrite_an_input_of_sin(x, w):
    y = x * 1
    z = y.sin()
    y.mul_(2)
    return z * w


def overwrite_an_output_of_exp(x, w):
    y = x.exp()
    z = y + 1
    y.mul_(2)
    return z * w


def overwrite_a_factor(x, w):
    factor = torch.ones(3)
    y = x * factor
    factor.add_(1)
    return y * w


def overwrite_through_a_view(x, w):
    y = x * 1
    z = y.cos()
    y[:1].zero_()
    return z * w


def overwrite_a_base(x, w):
    y = x * 1
    z = y[1:].cos()
    y.zero_()
    return z * w[1:]


OVERWRITES = [
    overwrite_an_input_of_sin,
    overwrite_an_output_of_exp,
    overwrite_a_factor,
    overwrite_through_a_view,
    overwrite_a_base,
]


@pytest.mark.only("hooks", because="autograd itself refuses it in the graph of the other engine's replay")
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("function", OVERWRITES, ids=lambda function: function.__name__)
def test_a_saved_tensor_that_its_own_function_overwrites_is_refused(engine, function, early_stop):
    """Rule 4: plain autograd refuses this backward, so the checkpoint does, and names the function."""
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(function(x, w).sum(), [x])
    with pytest.raises(
        ValueChangedError, match=f"{function.__name__}.*was changed in place after an operator saved it"
    ):
        engine.checkpoint(function, x, w, early_stop=early_stop).sum().backward()
    assert x.grad is None


@pytest.mark.only("hooks", because="autograd itself refuses it in the graph of the other engine's replay")
def test_the_refusal_stays_when_backward_is_tried_again(engine):
    """Rule 4: a second try meets the same refusal, not half of a replay."""
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    out = engine.checkpoint(overwrite_an_input_of_sin, x, w).sum()
    for _ in range(3):
        with pytest.raises(ValueChangedError):
            out.backward(retain_graph=True)
    assert x.grad is None


def test_gradients_that_do_not_read_the_overwritten_tensor_are_given(engine):
    """Rule 4: only reading it is an error, as with plain autograd."""
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    want = torch.autograd.grad(overwrite_an_input_of_sin(x, w).sum(), [w])
    got = torch.autograd.grad(engine.checkpoint(overwrite_an_input_of_sin, x, w).sum(), [w])
    assert torch.equal(got[0], want[0])


CHANGES = {
    "itself": lambda t: t.add_(1),
    "a view of it": lambda t: t[:1].zero_(),
    "through data of a view": lambda t: t.view(-1)[0].mul_(2),
    "twice": lambda t: t.mul_(2).div_(2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("saved", [True, False], ids=["read by the first operator", "only added"])
def test_an_input_changed_in_place_since_forward_is_refused_by_name(engine, change, saved):
    """Rule 4: the version counter tells, and the message names the argument."""
    x, other = torch.randn(3, requires_grad=True), torch.randn(3)
    region = (
        (lambda a, *, parts: (a * parts["h"][1]).sin()) if saved else (lambda a, *, parts: (a + parts["h"][1]).sin())
    )
    out = engine.checkpoint(region, x, parts={"h": [0, other]})
    CHANGES[change](other)
    with pytest.raises(InputChangedError, match="in place") as refused:
        out.sum().backward()
    assert refused.value.names == ["parts['h'][1]"]
    assert x.grad is None


def test_an_input_whose_base_was_changed_is_refused(engine):
    """Rule 4: a view shares the counter of its base."""
    base = torch.randn(4, 3)
    x = torch.randn(3, requires_grad=True)
    out = engine.checkpoint(lambda t, row: (t * row).sin(), x, base[1])
    base.zero_()
    with pytest.raises(InputChangedError, match="argument 1"):
        out.sum().backward()


def test_an_input_changed_between_two_backwards_is_refused_by_the_second(engine):
    """Rule 4: every replay looks."""
    x, other = torch.randn(3, requires_grad=True), torch.randn(3)
    out = engine.checkpoint(lambda a, b: (a * b).sin(), x, other).sum()
    out.backward(retain_graph=True)
    first = x.grad.clone()
    other.add_(1)
    with pytest.raises(InputChangedError):
        out.backward()
    assert torch.equal(x.grad, first)


@pytest.mark.only("hooks", because="the other engine replays whenever backward comes by")
def test_an_input_that_nothing_replays_may_change(engine):
    """Rule 2: where backward needs no replay there is nothing to refuse."""
    x, other = torch.randn(3, requires_grad=True), torch.randn(3)
    out = engine.checkpoint(torch.add, x, other)
    other.add_(1)
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_an_optimiser_step_between_forward_and_backward_is_refused_for_an_argument(engine):
    """Rule 4: a parameter given as an argument is an input like others."""
    weight, x = torch.nn.Parameter(torch.randn(3)), torch.randn(3, requires_grad=True)
    out = engine.checkpoint(lambda t, w: (t * w).sin(), x, weight)
    weight.grad = torch.ones(3)
    torch.optim.SGD([weight], lr=0.1).step()
    with pytest.raises(InputChangedError, match="argument 1"):
        out.sum().backward()
    assert x.grad is None


def test_an_input_changed_in_place_between_prefire_and_backward_is_not_used_silently(engine):
    """Rule 4: the replay holds aliases of inputs; a change after it is as wrong as a change before it."""
    leaf, extra = torch.ones(3, requires_grad=True), torch.ones(3)
    with recompute_handle_collector_ctx() as handles:
        out = engine.checkpoint(lambda t, e: (t * e).sin(), leaf, extra).sum()
    recompute_handle(handles[0], "session")
    extra.add_(1)
    with recompute_session_ctx("session"), pytest.raises(CheckpointError, match="in place"):
        out.backward()
    assert leaf.grad is None


def test_the_output_may_be_changed_in_place_afterwards(same_grads):
    """Rule 1: nothing of the call is saved in its output that plain autograd would not save."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        out = call(lambda t: t.sin() * 2, x)
        out.add_(1).mul_(3)
        out.sum().backward()
        return x.grad

    same_grads(program)


def test_views_among_inputs_and_outputs_keep_their_base(same_grads):
    """Rule 1: an output that is a view of an input may be changed in place, and the base feels it."""

    def program(call):
        x = torch.randn(4, 3, requires_grad=True)
        base = x * 1
        view, grown = call(lambda t: (t[1:3], t.exp()), base)
        loss = grown.sum()
        view_is_view = view._base is base or view._is_view()
        (loss + (view * 2).square().sum()).backward()
        return view_is_view, x.grad

    same_grads(program)


class AddOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.mark_dirty(x)
        ctx.save_for_backward(factor)
        return x.mul_(factor)

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad * factor, None


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_custom_function_that_writes_into_its_input(same_grads, early_stop):
    """Rule 1: ``mark_dirty`` inside, on a result and on a view of one."""

    def program(call):
        x = torch.randn(3, 4, requires_grad=True)

        def region(t):
            y = AddOne.apply(t * 1, torch.tensor(1.5))
            z = AddOne.apply((t * 2).view(-1), torch.tensor(0.5))
            return y.sin() + z.view(3, 4).exp()

        call(region, x).sum().backward()
        return x.grad

    same_grads(program, early_stop=early_stop)
