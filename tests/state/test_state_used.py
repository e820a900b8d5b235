"""Like D3: what was changed since forward counts where a replay reads it, and nowhere else."""

import gc

import pytest
import torch
from torch import nn

import regrow
from regrow import StateChangedError, clear_recompute_session, recompute_handle, recompute_session_ctx
from regrow import recompute_handle_collector_ctx as collector


class Model(nn.Module):
    """Every call reaches the whole model, and uses a part of it."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.average = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("table", torch.randn(200, 100))

    def first(self, x):
        return self.body[0](x).tanh()

    def second(self, x):
        return self.body[1](x).sin()

    def last(self, x):
        return self.head(x).exp()


@torch.no_grad()
def step(*modules):
    for module in modules:
        for parameter in module.parameters():
            parameter.sub_(0.1)


def test_a_frozen_average_that_moves_between_forward_and_backward(same_in_any_way):
    """Rule 24: as in momentum encoders, teachers and averages of weights."""

    def program(run):
        model, x = Model(), torch.randn(3, 4, requires_grad=True)
        loss = run(model.second, run(model.first, x)).sum()
        step(model.average)
        run.backward(loss)
        return x.grad, [p.grad for p in model.body.parameters()]

    same_in_any_way(program)


def test_a_head_that_is_stepped_before_the_body_runs_backward(same_in_any_way):
    """Rule 24: the gradient is cut at the head, which is stepped; the body's backward comes later."""

    def program(run):
        model, x = Model(), torch.randn(3, 4, requires_grad=True)
        h = run(model.first, x)
        cut = h.detach().requires_grad_()
        run.backward(run(model.last, cut).sum())
        step(model.head)
        run.backward((h * cut.grad).sum())
        return x.grad, [p.grad for p in model.parameters()]

    same_in_any_way(program)


def test_a_prefire_after_another_part_was_stepped(engine, anywhere):
    """Rule 24: a scheduler prefires one stage when the optimiser of the next has stepped already."""
    model, x = Model(), torch.randn(3, 4, requires_grad=True)
    want = torch.autograd.grad(model.first(x).sum(), x)[0]
    with collector() as handles:
        loss = engine.checkpoint(model.first, x).sum()
    step(model.head, model.body[1])

    def backward():
        recompute_handle(handles[0], "stage")
        with recompute_session_ctx("stage"):
            loss.backward()
        clear_recompute_session("stage")

    anywhere(backward)
    assert torch.equal(x.grad, want)


def test_a_large_buffer_that_the_call_does_not_read_may_be_filled_anew(same_in_any_way):
    """Rule 24: it is too large to copy at every call; nothing was lost by that."""

    def program(run):
        model, x = Model(), torch.randn(3, 4, requires_grad=True)
        for _ in range(2):  # in the first call nothing is known of the buffer yet
            loss = run(model.first, x).sum()
            model.table.zero_()
            run.backward(loss)
        return x.grad

    same_in_any_way(program)


def test_a_large_buffer_that_is_read_is_refused(engine, anywhere):
    """Rule 24: its value in forward is gone."""
    model, x = Model(), torch.randn(3, 100, requires_grad=True)

    def function(x):
        return (x @ model.table.T).sin()

    engine.checkpoint(function, x).sum().backward()
    loss = engine.checkpoint(function, x).sum()
    model.table.zero_()
    with pytest.raises(StateChangedError) as refused:
        anywhere(loss.backward)
    assert refused.value.names == ["model.table"]


FIRST_USE = {
    "a bias": lambda layer, x: (x * 1.0 + layer.bias).cos(),
    "a view": lambda layer, x: (layer.weight.t()[:1].squeeze(0) + x.sin()).cos(),
    "an item": lambda layer, x: (x.sin() * layer.bias[0].item()).cos(),
    "a saved factor": lambda layer, x: x * layer.bias,
    "the last saved tensor": lambda layer, x: x.sin() * layer.bias,
    "a matrix": lambda layer, x: layer(x),
    "in a list": lambda layer, x: torch.stack([layer.bias, x.sin()]).sum(0).cos(),
    "by index": lambda layer, x: x.sin() * layer.weight[torch.tensor([1])],
    "in place": lambda layer, x: x.sin().add_(layer.bias).cos(),
    "by function": lambda layer, x: Twice.apply(x.sin(), layer.bias),
}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return x * bias * 2

    @staticmethod
    def backward(ctx, grad):
        x, bias = ctx.saved_tensors
        return grad * bias * 2, grad * x * 2


@pytest.mark.parametrize("name", FIRST_USE)
@pytest.mark.parametrize("early_stop", [True, False])
def test_whatever_reads_it_is_refused(engine, anywhere, name, early_stop):
    """Rule 24: as an operand, through a view, as a number, and where the last operator only saves it."""
    layer, x = nn.Linear(4, 4), torch.randn(4, requires_grad=True)
    loss = engine.checkpoint(lambda x: FIRST_USE[name](layer, x), x, early_stop=early_stop).exp().sum()
    step(layer)
    with pytest.raises(StateChangedError) as refused:
        anywhere(loss.backward)
    assert x.grad is None
    assert set(refused.value.names) <= {"layer.weight", "layer.bias"}


def test_a_function_that_swallows_exceptions_does_not_swallow_the_refusal(engine, anywhere):
    """Rule 24: the replay ends with it all the same."""
    layer, x = nn.Linear(4, 4), torch.randn(4, requires_grad=True)

    def function(x):
        try:
            return layer(x).sin()
        except Exception:
            return x.sin().exp()

    loss = engine.checkpoint(function, x).sum()
    step(layer)
    with pytest.raises(StateChangedError):
        anywhere(loss.backward)
    assert x.grad is None


@pytest.mark.only("hooks", because="the other engine has no selective checkpointing")
def test_what_a_policy_kept_of_a_changed_weight_is_not_read_again(engine, anywhere):
    """Rule 24: the product is kept, so the replay never multiplies; but backward needs the weight itself."""
    weight = torch.randn(4, 4)

    def function(x):
        return (x @ weight).sin()

    x = torch.randn(3, 4, requires_grad=True)
    loss = engine.checkpoint(function, x, policy_fn=lambda ctx, op, *a, **k: op is torch.ops.aten.mm.default).sum()
    weight.add_(1)
    with pytest.raises(StateChangedError):
        anywhere(loss.backward)


def test_shapes_and_types_may_be_read(same_in_any_way):
    """Rule 24: what is no number of a tensor does not depend on its values."""

    def program(run):
        scale, x = torch.ones(4), torch.randn(4, requires_grad=True)

        def function(x):
            return (x * scale.shape[0] * len(scale.detach().view(2, 2))).to(scale.dtype).sin()

        loss = run(function, x).sum()
        scale.mul_(2)
        run.backward(loss)
        return x.grad

    same_in_any_way(program)


def test_a_weight_that_is_swapped_in_for_forward_and_out_again(same_in_any_way):
    """Rule 24: as those who keep weights elsewhere do: hooks bring a new tensor each time, the same values."""

    def program(run):
        torch.manual_seed(0)
        layer, home = nn.Linear(4, 4).requires_grad_(False), {}
        home["weight"] = layer.weight.detach().clone()

        def bring(module, args):
            module.weight = nn.Parameter(home["weight"].clone(), requires_grad=False)

        def away(module, args, out):
            module.weight = nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)

        layer.register_forward_pre_hook(bring)
        layer.register_forward_hook(away)
        x = torch.randn(3, 4, requires_grad=True)
        loss = run(lambda x: layer(x).sin().exp(), x).sum()
        layer(x.detach())
        run.backward(loss)
        return x.grad

    same_in_any_way(program)


SCALE, OTHER = torch.full((4,), 2.0), None
LAYER = nn.Linear(4, 4)


def uses_a_global(x):
    return (x * SCALE).sin()


def mentions_a_global(x):
    if OTHER is not None and OTHER.shape == (0,):
        x = x * OTHER
    return x.sin()


def uses_a_global_module(x):
    return LAYER(x).sin()


def test_a_global_tensor_that_was_set_anew_is_refused(engine, anywhere, monkeypatch):
    """Rule 24: globals are looked up anew, and cannot be put back for one thread alone."""
    x = torch.randn(4, requires_grad=True)
    loss = engine.checkpoint(uses_a_global, x).sum()
    monkeypatch.setitem(globals(), "SCALE", torch.ones(4))
    with pytest.raises(StateChangedError) as refused:
        anywhere(loss.backward)
    assert (refused.value.rebound, x.grad) == (["SCALE"], None)


def test_a_global_module_that_was_set_anew_is_refused(engine, anywhere, monkeypatch):
    """Rule 24: a module may compute something else without a tensor that tells."""
    x = torch.randn(4, requires_grad=True)
    loss = engine.checkpoint(uses_a_global_module, x).sum()
    monkeypatch.setitem(globals(), "LAYER", nn.Identity())
    with pytest.raises(StateChangedError) as refused:
        anywhere(loss.backward)
    assert (refused.value.rebound, x.grad) == (["LAYER"], None)


def test_a_global_tensor_that_is_mentioned_and_not_used_may_be_set_anew(same_in_any_way, monkeypatch):
    """Rule 24: no operator of the replay is given it."""

    def program(run):
        monkeypatch.setitem(globals(), "OTHER", torch.ones(4))
        x = torch.randn(4, requires_grad=True)
        loss = run(mentions_a_global, x).sum()
        monkeypatch.setitem(globals(), "OTHER", torch.ones(4))
        run.backward(loss)
        return x.grad

    same_in_any_way(program)


def test_nothing_is_watched_where_nothing_was_changed(engine):
    """Rule 24: the price is paid in the rare case only."""
    layer, seen = nn.Linear(4, 4), []

    def function(x):
        seen.append(torch.utils._python_dispatch._get_current_dispatch_mode())
        return layer(x).sin()

    engine.checkpoint(function, torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert seen == [None, None]
    assert not regrow.is_recomputing()


def test_noise_that_the_last_operator_still_writes(engine, anywhere):
    """Rule 5: the watch does not make the stop come early; RReLU writes its noise after it saved it."""

    def grads(call):
        torch.manual_seed(3)
        layer, other, act = nn.Linear(4, 4), nn.Linear(4, 4), nn.RReLU()

        def function(t):
            assert other is not None
            return act(layer(t))

        x = torch.randn(3, 4, requires_grad=True)
        loss = call(function, x).sum()
        step(other)
        anywhere(loss.backward)
        return x.grad

    assert torch.equal(grads(engine.checkpoint), grads(lambda function, *args: function(*args)))


def test_parameters_that_are_parts_of_one_buffer(same_in_any_way):
    """Rule 24: as in flat optimisers; the step of one does not refuse the others."""

    def program(run):
        flat = torch.randn(40)
        blocks = [nn.Linear(4, 4) for _ in range(2)]
        for index, block in enumerate(blocks):
            block.weight.data = flat[index * 16 : index * 16 + 16].view(4, 4)
        x = torch.randn(3, 4, requires_grad=True)
        loss = run(lambda t: blocks[0](t).sin() if blocks else t, x).sum()
        step(blocks[1])
        run.backward(loss)
        return x.grad, blocks[0].weight.grad

    same_in_any_way(program)


def test_compiled_code_beside_a_changed_parameter(engine):
    """Rule 24: it runs compiled in the replay, and saves what it saved in forward."""
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    compiled = torch.compile(lambda t: layer(t).sin().exp() * 2, backend="aot_eager")

    def function(t):
        assert other is not None
        return compiled(t).sin()

    x = torch.randn(3, 4, requires_grad=True)
    want = torch.autograd.grad(function(x).sum(), x)[0]
    loss = engine.checkpoint(function, x).sum()
    step(other)
    loss.backward()
    torch.testing.assert_close(x.grad, want)


def test_a_refusal_holds_nothing(engine):
    """Rule 12: neither what the replay made nor the module, with the garbage collector off."""
    alive = []

    def run():
        layer = nn.Linear(4, 4)

        def function(t):
            h = t.exp()
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage()))
            return layer(h).sin()

        loss = engine.checkpoint(function, torch.randn(3, 4, requires_grad=True)).sum()
        step(layer)
        with pytest.raises(StateChangedError):
            loss.backward()

    gc.collect()
    gc.disable()
    try:
        run()
        assert all(storage.expired() for storage in alive)
    finally:
        gc.enable()


def test_a_head_that_is_exchanged_between_forward_and_backward(same_in_any_way):
    """Rule 24: the replay runs the children that forward ran, and leaves the new ones in place."""

    def program(run):
        model = Model()
        heads = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
        x = torch.randn(3, 4, requires_grad=True)
        losses = []
        for head in heads:
            model.head = head
            losses.append(run(model.last, x).sum())
        run.backward(sum(losses))
        assert model.head is heads[-1]
        return x.grad, [p.grad for head in heads for p in head.parameters()]

    same_in_any_way(program)


def test_parameters_that_changed_places_are_where_they_were(same_grads, anywhere):
    """Rule 24: both are known, and neither is where it was."""

    def program(call):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
        loss = call(model, x).exp().sum()
        model[0].weight, model[1].weight = model[1].weight, model[0].weight
        anywhere(loss.backward)
        return x.grad, *(p.grad for p in model.parameters())

    same_grads(program)


def test_a_part_of_a_conjugated_view_that_was_changed(engine, anywhere):
    """Rule 24: what it spans is told by its strides; the part lies behind as many bytes as it has numbers."""
    view = torch.randn(8, 8, dtype=torch.complex64).conj()[:, ::4]
    x = torch.randn(2, requires_grad=True)
    loss = engine.checkpoint(lambda x: (x * view[7].abs()).sin(), x).sum()
    view.mul_(2)
    with pytest.raises(StateChangedError):
        anywhere(loss.backward)
