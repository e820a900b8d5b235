"""Like D1 to D3: what is overwritten by the function, its caller or an optimiser. Right as in plain, or refused."""

from functools import partial

import pytest
import torch
from torch import nn

from regrow import (
    InputChangedError,
    StateChangedError,
    ValueChangedError,
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from regrow._core.carrier import say_sharded

REGIONS = {
    "view written, base returned": lambda x, s: ((h := x * s).view(-1)[1:].mul_(2), h)[1],
    "base written, view returned": lambda x, s: ((h := x + s), (v := h[:, 1:]), h.mul_(s), v)[3],
    "chunks, one filled": lambda x, s: ((h := x * s), h[0].fill_(2.0), h)[2],
    "index put": lambda x, s: (x * s).index_put_((torch.tensor([0]),), s),
    "diagonal": lambda x, s: ((h := x * s), h[0].diagonal().add_(s), h.sin_())[2],
    "expanded, cloned": lambda x, s: s.expand(2, 3, 4).clone().mul_(x).transpose_(0, 1),
    "masked": lambda x, s: (x * s).masked_fill_(x > 0, 0.5).t_() if x.dim() == 2 else (x * s).masked_fill_(x > 0, 0.5),
    "out of split": lambda x, s: torch.cat([part.clone().exp_() for part in (x * s).split(1)]).clamp_(max=2),
}


@pytest.mark.parametrize("name", REGIONS)
def test_a_result_that_was_written_in_place_carries_the_gradient(same_in_any_way, name):
    """Rule 1: views, bases and indices that are written inside the function are no input."""

    def program(run):
        x = torch.randn(2, 3, 4, requires_grad=True)
        shift = torch.tensor(0.25, requires_grad=True)
        out = run(REGIONS[name], x, shift)
        run.backward((out.sin() * torch.randn(out.shape)).sum())
        return out.detach(), x.grad, shift.grad

    same_in_any_way(program)


def test_the_caller_writes_the_result_in_place(same_in_any_way):
    """Rule 1: a result that no operator saved may be written behind the call, and by the next call."""

    def program(run):
        x = torch.randn(2, 4, requires_grad=True)
        out = run(lambda x: x.sin() * 2 + x, x)
        out[:, 1:].mul_(3)
        out = run(lambda h: h.exp() + 1, out)
        run.backward(out.add_(1).sum())
        return x.grad

    same_in_any_way(program)


def test_buffers_of_modules_that_write_in_place_and_inputs_that_only_share_memory(same_in_any_way):
    """Rule 1: in-place modules inside, and an input that is a view of something larger."""

    def program(run):
        body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Hardtanh(inplace=True))
        base = torch.randn(6, 4, requires_grad=True)
        run.backward(run(body, base[1:5]).square().sum())
        return base.grad, body[0].weight.grad, body[2].running_var

    same_in_any_way(program)


OVERWRITES = {
    "itself": lambda h, g: h.mul_(g).sin(),
    "a view of it": lambda h, g: (h[1:].mul_(2), h.sin() * g)[1],
    "by index": lambda h, g: (h.__setitem__(0, 5.0), (h * g).exp())[1],
    "at the end": lambda h, g: ((h * 1).sin() * g, h.zero_())[0],
    "by out=": lambda h, g: ((h * g).sin(), torch.add(h.detach(), 1, out=h.detach()))[0],
}


@pytest.mark.only("hooks", because="the other engine refuses it in forward")
@pytest.mark.parametrize("name", OVERWRITES)
def test_a_function_that_overwrites_its_input_is_refused(engine, anywhere, name):
    """Rule 4: the replay could not start from forward's values; nothing accumulates."""
    x = torch.linspace(-1, 1, 4).requires_grad_()
    gain = torch.tensor([1.5, -2.0, 0.5, 3.0], requires_grad=True)
    out = engine.checkpoint(OVERWRITES[name], x * 1.0, gain)
    with pytest.raises(InputChangedError) as refused:
        anywhere(out.sum().backward)
    assert (refused.value.names, x.grad, gain.grad) == (["argument 0"], None, None)


INPUTS = {
    "work buffer": (lambda b: b.copy_(torch.ones(3, 4)), ["state['b'][1]"]),
    "a view": (lambda b: b[1:].zero_(), ["state['b'][1]"]),
    "a base": (lambda b: b._base.mul_(2), ["state['b'][1]"]),
    "a detached alias": (lambda b: b.detach().add_(1), ["state['b'][1]"]),
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_is_refilled_is_refused_by_name(engine, anywhere, name):
    """Rule 4: through whichever alias it was written; the first call is refused before it gives anything."""
    change, names = INPUTS[name]
    weight = torch.randn(4, 4, requires_grad=True)
    buffer = torch.randn(4, 4)[1:]
    out = engine.checkpoint(lambda *, state: (state["b"][1] @ weight).tanh(), state={"b": [0, buffer]})
    change(buffer)
    with pytest.raises(InputChangedError) as refused:
        anywhere(out.sum().backward)
    assert (refused.value.names, weight.grad) == (names, None)


def test_a_refused_session_is_free_again(engine, anywhere):
    """Rule 11: a prefire that is refused binds nothing; with a fresh forward the same session works."""
    weight, buffer = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)

    def forward():
        with recompute_handle_collector_ctx() as handles:
            out = engine.checkpoint(lambda b: (b @ weight).tanh(), buffer)
        return out.sum(), handles[0]

    loss, handle = forward()
    buffer.add_(1)
    with pytest.raises(InputChangedError):
        anywhere(lambda: recompute_handle(handle, "refused"))
    assert weight.grad is None
    loss, handle = forward()

    def again():
        recompute_handle(handle, "refused")
        with recompute_session_ctx("refused"):
            loss.backward()
        clear_recompute_session("refused")

    anywhere(again)
    assert weight.grad is not None


def test_a_write_through_data_is_not_seen(engine, anywhere):
    """Rule 4: .data does not move the version, so the replay computes with what is there, as with torch."""
    weight, buffer = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    loss = engine.checkpoint(lambda b: (b @ weight).sum(), buffer)
    buffer.data.fill_(2.0)
    anywhere(loss.backward)
    torch.testing.assert_close(weight.grad, torch.full((4, 4), 6.0))


def reach_parameter(model):
    return {
        "module": (model, "0.weight"),
        "closure": (lambda x: model(x).sin(), "model.0.weight"),
        "partial": (partial(lambda module, x: module(x), model), "argument 0.0.weight"),
        "method": (model.forward, "self.0.weight"),
    }


@pytest.mark.parametrize("name", reach_parameter(nn.Identity()))
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_parameter_that_was_stepped_meanwhile_is_refused_by_name(engine, anywhere, name, frozen):
    """Rule 24: nothing accumulates, and the error says which parameter, also one that is frozen."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].weight.requires_grad_(not frozen)
    function, path = reach_parameter(model)[name]
    x = torch.randn(3, 4, requires_grad=True)
    loss = engine.checkpoint(function, x).sum()
    with torch.no_grad():
        model[0].weight.sub_(0.1)
    with pytest.raises(StateChangedError) as refused:
        anywhere(loss.backward)
    assert (refused.value.names, x.grad, model[2].bias.grad) == ([path], None, None)


def test_a_step_of_an_optimiser_between_forward_and_backward_is_refused(engine, anywhere):
    """Rule 24: the first parameters that are read are named, and the gradients are those from before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    held = [p.grad.clone() for p in model.parameters()]
    loss = engine.checkpoint(model, torch.randn(3, 4)).sum()
    optimiser.step()
    with pytest.raises(StateChangedError) as refused:
        anywhere(loss.backward)
    assert refused.value.names == ["0.weight", "0.bias"]
    assert all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), held, strict=True))


def test_a_captured_tensor_that_was_written_is_refused_by_name(engine, anywhere):
    """Rule 24: a tensor that the function closes over counts as its state."""
    scale, x = torch.full((4,), 2.0), torch.randn(4, requires_grad=True)
    loss = engine.checkpoint(lambda x: (x * scale).sin(), x).sum()
    scale.mul_(3)
    with pytest.raises(StateChangedError) as refused:
        anywhere(loss.backward)
    assert (refused.value.names, x.grad) == (["scale"], None)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_an_optimiser_that_steps_inside_backward_goes_on_working(same_in_any_way, name):
    """Rule 24: what has been stepped so far lies above, and is not used by the replays that are left."""

    def program(run):
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
        for parameter in blocks.parameters():
            optimiser = getattr(torch.optim, name)([parameter], lr=0.1)

            def step(parameter, optimiser=optimiser):
                optimiser.step()
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        x = torch.randn(3, 4, requires_grad=True)
        for _ in range(2):
            h = x
            for index in range(3):
                h = run(lambda h, index=index: blocks[index](h), h)
            run.backward(h.square().sum())
        return x.grad, list(blocks.parameters())

    same_in_any_way(program)


def test_an_average_of_the_weights_that_the_function_does_not_use_may_move(same_in_any_way):
    """Rule 24: a list that is closed over for its model does not bring the averages in it along."""

    def program(run):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        averages = [p.detach().clone() for p in model.parameters()]

        def function(x):
            assert len(averages) == 4
            return model(x)

        x = torch.randn(3, 4, requires_grad=True)
        loss = run(function, x).square().sum()
        for average in averages:
            average.mul_(0.9)
        run.backward(loss)
        return x.grad, [p.grad for p in model.parameters()], averages

    same_in_any_way(program)


def test_a_regrown_value_that_is_overwritten_before_it_is_read_is_refused(engine, anywhere):
    """Rule 4: what a prefire brought back and other code then wrote gives nothing to anybody."""
    made, x = [], torch.randn(4, requires_grad=True)

    def function(x):
        made.append(x.exp())
        return made[-1].cos()

    with recompute_handle_collector_ctx() as handles:
        loss = engine.checkpoint(function, x).sum()

    def backward():
        recompute_handle(handles[0], "overwritten")
        made[1].detach().add_(1)
        with recompute_session_ctx("overwritten"):
            loss.backward()

    with pytest.raises(ValueChangedError):
        anywhere(backward)
    clear_recompute_session("overwritten")
    assert (len(made), x.grad) == (2, None)


@pytest.mark.parametrize("kind", [nn.Parameter, type("OfItsOwn", (nn.Parameter,), {})], ids=["parameter", "subclass"])
def test_a_parameter_that_was_replaced_meanwhile_is_forwards_in_the_replay(same_grads, anywhere, kind):
    """Rule 24: forward's takes the gradient, and the new one is in place afterwards."""

    def program(call):
        layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
        layer.weight = was = kind(layer.weight.detach().clone())
        loss = call(lambda x: layer(x).sin(), x).sum()
        layer.weight = now = kind(torch.zeros(4, 4))
        anywhere(loss.backward)
        assert layer.weight is now
        assert now.grad is None
        return x.grad, was.grad, layer.bias.grad

    same_grads(program)


@pytest.mark.parametrize("first", ["added", "taken away", "registered later"])
def test_a_parameter_that_comes_or_goes_meanwhile(same_grads, anywhere, first):
    """Rule 24: the replay has those of forward, by name, and what there is afterwards is there again."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.linspace(0.5, 1, 4))
            if first != "registered later":
                self.register_parameter("b", nn.Parameter(torch.ones(4)) if first == "taken away" else None)

        def forward(self, x):
            b = getattr(self, "b", None)
            return (x * self.w if b is None else x * self.w + b).sin()

    def program(call):
        module, x = Shifted(), torch.randn(3, 4, requires_grad=True)
        was = getattr(module, "b", None)
        loss = call(module, x).sum()
        module.register_parameter("b", now := None if first == "taken away" else nn.Parameter(torch.ones(4)))
        anywhere(loss.backward)
        assert module.b is now
        return x.grad, module.w.grad, None if was is None else was.grad

    same_grads(program)


def test_a_prefire_without_the_memory_of_its_parameters_leaves_the_replay_to_backward(same_grads, caplog):
    """Rule 31: as under FSDP, which frees whole parameters between forward and backward."""

    def program(call):
        layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
        with recompute_handle_collector_ctx() as handles:
            loss = call(lambda t: layer(t).sin(), x).sum()
        storage, values = layer.weight.untyped_storage(), layer.weight.detach().clone()
        n_bytes = storage.nbytes()
        storage.resize_(0)
        for handle in handles:
            recompute_handle(handle, "step")
        storage.resize_(n_bytes)
        layer.weight.data.copy_(values)
        loss.backward()
        clear_recompute_session("step")
        return x.grad, layer.weight.grad

    say_sharded.cache_clear()
    same_grads(program)
    assert "not replayed ahead of backward" in caplog.text
