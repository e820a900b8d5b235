"""A backward in two halves through reentrant calls: dx, dw, both forms of dw, triggers, sessions, memory, errors."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

import regrow
from regrow import (
    CheckpointError,
    FrameBusyError,
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
    reentrant_checkpoint_scope,
)
from tests.conftest import SEED, Counted, assert_same, plain

call = partial(regrow.checkpoint, use_reentrant=True)


class Block(nn.Module):
    """A residual block with dropout that counts its runs."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return x + self.down(torch.dropout(torch.nn.functional.gelu(self.up(self.norm(x))), 0.1, True))


class Model(nn.Module):
    """Plain layers before, between and behind two blocks."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.before, self.between, self.behind = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.one, self.two = Block(), Block()

    def forward(self, x):
        h = self.run(self.one, self.before(x).sin())
        return self.behind(self.run(self.two, self.between(h).tanh()))

    @property
    def explicit(self):
        return [p for layer in (self.before, self.between, self.behind) for p in layer.parameters()]

    def grads(self):
        return [p.grad for p in self.parameters()]


def made(run, make=Model):
    torch.manual_seed(SEED)
    model = make(run)
    x = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(SEED + 1)
    return model, x


def oracle(make=Model):
    model, x = made(plain, make)
    out = model(x)
    gradient = torch.linspace(-1, 1, out.numel()).view_as(out)
    out.backward(gradient)
    return gradient, x.grad, model.grads()


def set_phase(handles, phase):
    for handle in handles:
        handle.set_phase(phase)


def split(model, x, gradient, form):
    """dx and dw in one of the two forms; gradients of captured parameters and of the others end in ``.grad``."""
    with reentrant_checkpoint_scope(model.parameters()) as handles:
        out = model(x)
    triggers = [handle.backward_trigger for handle in handles]
    set_phase(handles, "dx")
    if form == "torch's":
        weights = [*model.parameters(), *triggers]
        (dx,), groups = stage_backward_input([out], [gradient], [x], iter(weights))
        between = model.grads()
        set_phase(handles, "dw")
        stage_backward_weight(iter(weights), groups)
    else:
        (dx,) = torch.autograd.grad(out, x, gradient, retain_graph=True)
        between = model.grads()
        set_phase(handles, "dw")
        explicit = getattr(model, "explicit", [])
        found = torch.autograd.grad(out, [*explicit, *triggers], gradient)
        for p, grad in zip(explicit, found, strict=False):
            p.grad = grad
    return dx, between, triggers, handles


@pytest.mark.parametrize("form", ["torch's", "second grad"])
def test_dx_and_dw_are_plain_backward_with_one_replay(form):
    """Rule 36: bit for bit, parameters untouched after dx, each call run once more, every handle released."""
    gradient, want_dx, want_dw = oracle()
    model, x = made(call)
    dx, between, triggers, handles = split(model, x, gradient, form)
    assert_same(dx, want_dx)
    assert between == [None] * len(between)
    assert_same(model.grads(), want_dw)
    assert (model.one.runs, model.two.runs) == (2, 2)
    assert [handle.released for handle in handles] == [True, True]
    assert triggers[0] is not triggers[1]


def test_the_gradient_of_a_trigger_is_a_tensor_without_elements():
    """Rule 36: never None, in either half."""
    with reentrant_checkpoint_scope([]) as handles:
        out = call(nn.Linear(2, 2), torch.randn(2, 2, requires_grad=True))
    trigger = handles[0].backward_trigger
    assert (trigger.numel(), trigger.requires_grad) == (0, True)
    for phase in ("dx", "dw"):
        handles[0].set_phase(phase)
        (grad,) = torch.autograd.grad(out.sum(), trigger, retain_graph=True)
        assert grad.shape == (0,)


def test_dw_without_dx_computes_both():
    """Rule 36: as on the first stage of a pipeline, whose input needs no gradient."""
    gradient, want_dx, want_dw = oracle()
    model, x = made(call)
    with reentrant_checkpoint_scope(model.parameters()) as handles:
        out = model(x)
    set_phase(handles, "dw")
    out.backward(gradient)
    assert_same([x.grad, *model.grads()], [want_dx, *want_dw])
    assert (model.one.runs, model.two.runs) == (2, 2)


class OnlyCaptured(Model):
    """Nothing but calls, so that parameters are reached by triggers alone."""

    explicit = ()

    def forward(self, x):
        return self.run(self.two, self.run(self.one, x))


class Shared(Model):
    """A parameter used in a call twice, one shared by two calls, one inside and outside, one given as an argument."""

    def __init__(self, run):
        super().__init__(run)
        self.scale, self.weight = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        h = self.run(lambda t, w: (self.one(t * self.scale) * self.scale) @ w, self.before(x), self.weight)
        return self.run(lambda t, w: self.two(t) * self.scale @ w, h * self.scale, self.weight)

    @property
    def explicit(self):
        return [*self.before.parameters(), self.weight]


# torch's split frees the path between two uses of one parameter, without any checkpoint.
@pytest.mark.parametrize(
    ("make", "form"), [(OnlyCaptured, "torch's"), (OnlyCaptured, "second grad"), (Shared, "second grad")]
)
def test_every_contribution_arrives(make, form):
    """Rule 36: where a gradient has parts in several calls, they are added in another order than in plain backward."""
    gradient, want_dx, want_dw = oracle(make)
    model, x = made(call, make)
    if make is Shared:
        with reentrant_checkpoint_scope(model.parameters()) as handles:
            out = model(x)
        set_phase(handles, "dx")
        (dx,) = torch.autograd.grad(out, x, gradient, retain_graph=True)
        set_phase(handles, "dw")
        explicit = [*model.explicit, model.scale]
        triggers = [handle.backward_trigger for handle in handles]
        found = torch.autograd.grad(out, [*explicit, *triggers], gradient)
        for p, grad in zip(explicit, found, strict=False):
            p.grad = grad if p.grad is None else p.grad + grad
    else:
        dx, *_ = split(model, x, gradient, form)
    torch.testing.assert_close([dx, *model.grads()], [want_dx, *want_dw])


class Operators(TorchDispatchMode):
    """Counts operators with the shapes of their inputs; views and empty tensors aside."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        views = ("view", "detach", "t.", "expand", "transpose", "as_strided", "alias", "new_", "zeros", "ones")
        if all(t.numel() for t in tensors) and not any(name in str(func) for name in views):
            self.seen[(str(func), *(tuple(t.shape) for t in tensors))] += 1
        return out


def count(work):
    with Operators() as operators:
        work()
    return operators.seen


def test_dx_and_dw_run_the_operators_of_one_replay_and_one_backward():
    """Rule 36: no matrix product and no sum runs twice; layer norm runs once for each half, with an output mask."""
    model, x = made(call, OnlyCaptured)
    loss = model(x).sum()
    whole = count(loss.backward)
    model, x = made(call, OnlyCaptured)
    with reentrant_checkpoint_scope(model.parameters()) as handles:
        loss = model(x).sum()
    set_phase(handles, "dx")
    halves = count(lambda: torch.autograd.grad(loss, x, retain_graph=True))
    set_phase(handles, "dw")
    halves += count(lambda: torch.autograd.grad(loss, [handle.backward_trigger for handle in handles]))
    more = {key[0]: n for key, n in (halves - whole).items()}
    less = {key[0]: n for key, n in (whole - halves).items()}
    assert whole["aten.mm.default", (4, 8), (8, 16)] > 0
    assert set(more) <= {"aten.native_layer_norm_backward.default"}
    assert set(less) <= {"aten.add.Tensor", "aten.add_.Tensor", "aten.native_layer_norm_backward.default"}
    assert sum(more.values()) <= 2


def test_after_dx_only_what_dw_reads_is_alive_and_after_dw_nothing(gc_off, track):
    """Rule 36: of three activations dw reads the one that a weight was multiplied with."""
    a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def function(x):
        h = track((track(x.sin()) @ a).exp())  # saved by exp, for dx, and by the product, for dw
        return track(h.cos() @ b)

    with reentrant_checkpoint_scope([a, b]) as handles:
        out = call(function, torch.randn(4, 4, requires_grad=True))
    x = out.grad_fn.next_functions[1][0].variable
    assert track.alive == 1  # the output
    set_phase(handles, "dx")
    torch.autograd.grad(out, x, torch.ones(4, 4), retain_graph=True)
    assert track.alive == 2  # sin(x), which dw multiplies, too; cos was not tracked, exp is gone
    set_phase(handles, "dw")
    torch.autograd.grad(out, handles[0].backward_trigger, torch.ones(4, 4))
    assert track.alive == 1
    assert handles[0].released
    del out
    assert track.alive == 0


def test_a_pass_that_comes_through_after_dx_is_right_and_notes_nothing():
    """Rule 36: a parameter before two calls gets its gradient alone; dw starts from the first dx all the same."""
    gradient, want_dx, want_dw = oracle()
    model, x = made(call)
    with reentrant_checkpoint_scope(model.parameters()) as handles:
        out = model(x)
    set_phase(handles, "dx")
    (dx,) = torch.autograd.grad(out, x, gradient, retain_graph=True)
    (weight,) = torch.autograd.grad(out, model.before.weight, gradient * 2, retain_graph=True)
    set_phase(handles, "dw")
    (bias,) = torch.autograd.grad(out, model.before.bias, gradient, retain_graph=True)
    triggers = [handle.backward_trigger for handle in handles]
    torch.autograd.grad(out, triggers, gradient)
    assert_same(dx, want_dx)
    assert_same(weight, want_dw[0] * 2)
    assert_same(bias, want_dw[1])
    names = [name for name, _ in model.named_parameters()]
    captured = [index for index, name in enumerate(names) if name.startswith(("one", "two"))]
    assert_same([model.grads()[index] for index in captured], [want_dw[index] for index in captured])


def test_hooks_of_captured_parameters_run_in_dw():
    """Rule 36: tensor hooks and those after accumulation, once per call."""
    layer, fired = nn.Linear(3, 3, bias=False), []
    layer.weight.register_hook(lambda grad: fired.append("tensor"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    x = torch.randn(2, 3, requires_grad=True)
    with reentrant_checkpoint_scope(layer.parameters()) as handles:
        loss = call(lambda t: layer(t.sin()), x).sum()
    set_phase(handles, "dx")
    torch.autograd.grad(loss, x, retain_graph=True)
    assert fired == []
    set_phase(handles, "dw")
    torch.autograd.grad(loss, handles[0].backward_trigger)
    assert fired == ["tensor", "accumulated"]


def test_the_source_of_parameters_is_asked_once_and_only_for_a_call():
    """Rule 36: it may be costly, or not there yet."""
    asked = []

    def source():
        asked.append(None)
        return [torch.ones(2), torch.ones(2, requires_grad=True)]

    with reentrant_checkpoint_scope(source):
        pass
    with reentrant_checkpoint_scope(source) as handles:
        call(torch.sin, torch.ones(2))  # needs no gradient: a plain call
        assert (len(asked), handles) == (1, [])
        out = [call(torch.sin, torch.ones(2, requires_grad=True)) for _ in range(3)]
    assert (len(asked), len(handles), len(out)) == (1, 3, 3)


@pytest.mark.parametrize("source", [torch.ones(2), 3, [torch.ones(2), "w"], lambda: [1], lambda: None])
def test_a_source_of_anything_but_tensors_is_refused(source):
    """Rule 19: at the scope, or, for a function, at the first call."""

    def run():
        with reentrant_checkpoint_scope(source):
            call(torch.sin, torch.ones(2, requires_grad=True))

    with pytest.raises(ValueError, match="parameters must"):
        run()


def in_scope(**kwargs):
    with reentrant_checkpoint_scope([]) as handles:
        out = call(torch.sin, torch.randn(3, requires_grad=True), **kwargs)
    return out, handles[0]


def test_scopes_do_not_nest():
    """Rule 19."""
    outer, inner = reentrant_checkpoint_scope([]), reentrant_checkpoint_scope([])
    with outer, pytest.raises(ValueError, match="inside another one"), inner:
        pass


def test_a_phase_that_was_never_set_is_refused_and_can_be_set_then():
    """Rule 36: by naming what to call; nothing is lost."""
    out, handle = in_scope()
    with pytest.raises(CheckpointError, match=r'phase was never set.*set_phase\("dx"\)'):
        out.sum().backward()
    handle.set_phase("dw")
    out.sum().backward()


def test_a_handle_says_what_is_wrong_with_a_phase():
    """Rule 19: another name; a call that is not split; one that was released, or has died."""
    out, handle = in_scope()
    with pytest.raises(ValueError, match='must be "dx" or "dw", got \'dz\''):
        handle.set_phase("dz")
    assert (handle.split, handle.phase, handle.released) == (True, None, False)
    handle.set_phase("dx")
    assert handle.phase == "dx"
    handle.release()
    handle.release()
    assert handle.released
    with pytest.raises(RuntimeError, match="was released"):
        handle.set_phase("dw")
    with pytest.raises(RuntimeError, match="was released"):
        handle.recompute()
    with pytest.raises(RuntimeError, match="was released"):
        out.sum().backward()
    del out
    with pytest.raises(RuntimeError, match="has died"):
        handle.set_phase("dx")
    handle.release()
    assert (handle.split, handle.phase, handle.released, handle.backward_trigger) == (False, None, True, None)

    with recompute_handle_collector_ctx() as handles:
        alive = call(torch.sin, torch.randn(3, requires_grad=True))
    assert alive.requires_grad
    assert (handles[0].split, handles[0].backward_trigger) == (False, None)
    with pytest.raises(ValueError, match='phase "dx" on a call that is not split'):
        handles[0].set_phase("dx")


def test_a_limited_backward_outside_a_scope_is_refused_while_it_captures_parameters():
    """Rule 35: ``.grad`` would be written although nobody asked; the call is as it was, and a whole backward works."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    loss = call(lambda t: layer(t).sin(), x).sum()
    for limited in (lambda: torch.autograd.grad(loss, x), lambda: loss.backward(inputs=[x])):
        with pytest.raises(CheckpointError, match=r"captures 2 parameters.*reentrant_checkpoint_scope\(parameters\)"):
            limited()
        assert layer.weight.grad is None
    loss.backward()
    assert layer.weight.grad is not None


def test_a_limited_backward_is_right_where_nothing_is_captured(counted):
    """Rule 35: only what was asked for, in one replay."""
    region = counted(lambda a, b: (a.sin() * b).exp())
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    (got,) = torch.autograd.grad(call(region, a, b).sum(), b)
    (want,) = torch.autograd.grad(region.function(a, b).sum(), b)
    assert_same(got, want)
    assert (region.runs, a.grad) == (2, None)


def test_a_replay_of_its_own_serves_the_next_backward(counted):
    """Rule 9: ``handle.recompute()`` is a prefire without a session; again it does nothing."""
    region, x = counted(torch.sin), torch.randn(3, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        loss = call(region, x).sum()
    handles[0].recompute()
    handles[0].recompute()
    assert region.runs == 2
    loss.backward()
    assert (region.runs, handles[0].released) == (2, True)
    assert_same(x.grad, x.detach().cos())


def test_a_handle_goes_to_the_scope_and_to_the_collector():
    """Rule 21: the same handle, in forward order, and taken out again when its forward raises."""
    with recompute_handle_collector_ctx() as collected, reentrant_checkpoint_scope([]) as handles:
        outs = [call(torch.sin, torch.randn(3, requires_grad=True)) for _ in range(2)]
        with pytest.raises(KeyError):
            call(lambda x: {}[x], torch.randn(3, requires_grad=True))
    assert len(outs) == 2
    assert handles == collected
    assert [one is other for one, other in zip(handles, collected, strict=True)] == [True, True]


# ---- sessions


def session_model():
    model, x = made(call, OnlyCaptured)
    return model, x


@pytest.mark.parametrize("prefire", [False, True])
def test_in_a_session_the_halves_are_found_by_themselves(prefire):
    """Rule 9: dx by what it asks for, dw by ``backward()``; one replay, and what dw gives is plain."""
    gradient, want_dx, want_dw = oracle(OnlyCaptured)
    model, x = session_model()
    with recompute_handle_collector_ctx() as handles, recompute_session_ctx("s", retain_on_unpack=True):
        out = model(x)
    if prefire:
        for handle in handles:
            recompute_handle(handle, "s")
            recompute_handle(handle, "s")
    with recompute_session_ctx("s", retain_on_unpack=True):
        (dx,) = torch.autograd.grad(out, x, gradient, retain_graph=True)
        assert model.grads() == [None] * len(model.grads())
    with recompute_session_ctx("s"):
        out.backward(gradient)
    clear_recompute_session("s")
    assert_same([dx, x.grad], [want_dx, want_dx])
    assert_same(model.grads(), want_dw)
    assert (model.one.runs, model.two.runs) == (2, 2)


def test_a_second_loss_in_a_session_is_not_taken_for_dw():
    """Rule 36: dw starts from dx only where the gradient of the output is that of dx."""
    model, x = session_model()
    with recompute_session_ctx("s", retain_on_unpack=True):
        out = model(x)
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        out.square().sum().backward()
    clear_recompute_session("s")
    oracle_model, y = made(plain, OnlyCaptured)
    oracle_model(y).square().sum().backward()
    assert_same([x.grad, *model.grads()], [y.grad, *oracle_model.grads()])


def test_a_session_that_retains_serves_several_whole_backwards_with_one_replay(counted):
    """Rule 9: and clearing lets the call replay again."""
    region, x = counted(lambda t: t.sin().exp()), torch.randn(3, requires_grad=True)
    with recompute_session_ctx("s", retain_on_unpack=True):
        loss = call(region, x).sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
    assert region.runs == 2
    clear_recompute_session("s")
    loss.backward()
    assert region.runs == 3
    y = x.detach().requires_grad_()
    y.sin().exp().sum().backward()
    torch.testing.assert_close(x.grad, 4 * y.grad)


def test_a_plain_backward_meanwhile_replays_for_itself_and_evicts_nothing(counted):
    """Rule 9."""
    region, x = counted(torch.sin), torch.randn(3, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        loss = call(region, x).sum()
    recompute_handle(handles[0], "s")
    loss.backward(retain_graph=True)
    assert region.runs == 3
    with recompute_session_ctx("s", retain_on_unpack=True):
        loss.backward(retain_graph=True)
    assert region.runs == 3
    clear_recompute_session("s")


def test_what_a_session_holds_is_freed_by_clear(gc_off, track):
    """Rule 11: and nothing of it stands in a cycle."""
    layer = nn.Linear(3, 3)
    with recompute_handle_collector_ctx() as handles:
        out = call(lambda t: layer(track(t.sin())).exp(), torch.randn(3, 3, requires_grad=True))
    recompute_handle(handles[0], "s")
    assert track.alive == 1
    clear_recompute_session("s")
    assert track.alive == 0
    out.sum().backward()
    assert track.alive == 0


def test_another_session_is_refused_and_changes_nothing(counted):
    """Rule 8."""
    region, x = counted(torch.sin), torch.randn(3, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        loss = call(region, x).sum()
    recompute_handle(handles[0], "one")
    with pytest.raises(FrameBusyError):
        recompute_handle(handles[0], "two")
    with recompute_session_ctx("two"), pytest.raises(FrameBusyError):
        loss.backward()
    with recompute_session_ctx("one"):
        loss.backward()
    clear_recompute_session("one")
    assert region.runs == 2


def test_frames_of_both_engines_share_a_session():
    """Rule 9: one registry; a bind that must fail leaves nothing bound."""
    hooks, reentrant = (Counted(lambda t: t.sin().exp()) for _ in range(2))
    x = torch.randn(3, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        out = call(reentrant, regrow.checkpoint(hooks, x))
    assert [type(handle).__name__ for handle in handles] == ["Handle", "ReentrantHandle"]
    for handle in handles:
        recompute_handle(handle, "s")
    with recompute_session_ctx("s", retain_on_unpack=True):
        (dx,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    with recompute_session_ctx("s"):
        out.sum().backward()
    clear_recompute_session("s")
    y = x.detach().requires_grad_()
    y.sin().exp().sin().exp().sum().backward()
    assert_same([dx, x.grad], [y.grad, y.grad])
    assert (hooks.runs, reentrant.runs) == (2, 2)


def test_a_nest_of_both_engines_is_bound_as_a_whole_or_not_at_all():
    """Rule 8: the inner call is held by another session; nothing of the first is disturbed."""
    x = torch.randn(3, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        out = regrow.checkpoint(lambda t: call(torch.sin, t.exp()).cos(), x)
    outer, inner = handles
    recompute_handle(inner, "inner")
    with pytest.raises(FrameBusyError):
        recompute_handle(outer, "outer")
    assert (outer._frame().bound.id, inner._frame().bound.id) == ("inner", "inner")  # it brought the inner one's input
    clear_recompute_session("inner")
    assert (outer._frame().bound, inner._frame().bound) == (None, None)
    recompute_handle(outer, "outer")
    with recompute_session_ctx("outer"):
        out.sum().backward()
    clear_recompute_session("outer")
    y = x.detach().requires_grad_()
    y.exp().sin().cos().sum().backward()
    assert_same(x.grad, y.grad)


def test_a_replay_that_fails_leaves_no_half_of_a_session(gc_off, track):
    """Rule 11: the call is free for another session, and backward works."""
    fail = [True]

    def function(x):
        h = track(x.sin())
        if regrow.is_recomputing() and fail:
            raise KeyError("replay")
        return h.exp()

    x = torch.randn(3, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        loss = call(function, x).sum()
    with pytest.raises(KeyError):
        recompute_handle(handles[0], "one")
    assert track.alive == 0
    fail.clear()
    recompute_handle(handles[0], "two")
    with recompute_session_ctx("two"):
        loss.backward()
    clear_recompute_session("two")
    assert x.grad is not None


def test_a_failed_backward_in_a_session_that_retains_can_be_repeated():
    """Rule 11: outside one, it releases the call."""
    fail = [True]

    def hook(grad):
        if fail:
            raise KeyError("hook")

    layer = nn.Linear(3, 3)
    layer.weight.register_hook(hook)
    x = torch.randn(3, requires_grad=True)
    with recompute_session_ctx("s", retain_on_unpack=True):
        out = call(layer, x)
        with pytest.raises(KeyError):
            out.sum().backward(retain_graph=True)
        fail.clear()
        layer.zero_grad()
        x.grad = None
        out.sum().backward()
    clear_recompute_session("s")
    y = x.detach().requires_grad_()
    torch.nn.functional.linear(y, layer.weight, layer.bias).sum().backward()
    assert_same(x.grad, y.grad)


def test_prefire_of_a_call_that_died_or_was_released_says_so():
    """Rule 21."""
    with recompute_handle_collector_ctx() as handles:
        call(torch.sin, torch.randn(3, requires_grad=True))
        out = call(torch.sin, torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="has died"):
        recompute_handle(handles[0], "s")
    out.sum().backward()
    with pytest.raises(RuntimeError, match="was released"):
        recompute_handle(handles[1], "s")
    assert handles[1]._frame().bound is None


def test_a_captured_tensor_with_a_graph_is_refused_in_a_split_wherever_it_hides():
    """Rule 36: its graph leads out of the call, so dx would miss what flows there."""

    class Box:
        pass

    box, x = Box(), torch.randn(3, requires_grad=True)
    box.h = x.sin()
    with reentrant_checkpoint_scope([]) as handles:
        out = call(lambda t: t * box.h.exp(), x * 1)
    set_phase(handles, "dx")
    with pytest.raises(CheckpointError, match="captures a tensor that was computed outside"):
        torch.autograd.grad(out.sum(), x, retain_graph=True)


def test_backward_on_another_thread_finds_its_session(on_thread, on_pool_thread):
    """Rule 7: the frame knows it; no context variable is read in backward."""
    for where in (on_thread, on_pool_thread):
        region, x = Counted(lambda t: t.sin().exp()), torch.randn(3, requires_grad=True)
        with recompute_session_ctx("s", retain_on_unpack=True):
            loss = call(region, x).sum()
            where(partial(torch.autograd.grad, loss, x, retain_graph=True))
            where(loss.backward)
        clear_recompute_session("s")
        assert region.runs == 2
        y = x.detach().requires_grad_()
        y.sin().exp().sum().backward()
        assert_same(x.grad, y.grad)


def test_a_pass_in_dw_that_does_not_ask_for_the_trigger_notes_nothing():
    """Rule 36: without a dx before, with another gradient than the pass that follows."""
    gradient, _, want_dw = oracle()
    model, x = made(call)
    with reentrant_checkpoint_scope(model.parameters()) as handles:
        out = model(x)
    set_phase(handles, "dw")
    (weight,) = torch.autograd.grad(out, model.before.weight, gradient * 2, retain_graph=True)
    found = torch.autograd.grad(out, [*model.explicit, *(handle.backward_trigger for handle in handles)], gradient)
    for p, grad in zip(model.explicit, found, strict=False):
        p.grad = grad
    assert_same(weight, want_dw[0] * 2)
    assert_same(model.grads(), want_dw)


def test_dw_through_another_output_than_dx_is_computed_anew():
    """Rule 36: what dx kept belongs to the outputs that it started from."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    with reentrant_checkpoint_scope(layer.parameters()) as handles:
        one, two = call(lambda t: (layer(t).sin(), layer(t).cos()), x)
    set_phase(handles, "dx")
    torch.autograd.grad(one.sum(), x, retain_graph=True)
    set_phase(handles, "dw")
    torch.autograd.grad((one + two).sum(), handles[0].backward_trigger)
    got = [layer.weight.grad, layer.bias.grad]
    want = torch.autograd.grad((layer(x).sin() + layer(x).cos()).sum(), [layer.weight, layer.bias])
    assert_same(got, list(want))


def test_a_trigger_outside_its_session_gives_a_tensor_too():
    """Rule 36: the call was split by the session it was made in; outside it, it replays for itself."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    with recompute_handle_collector_ctx() as handles, recompute_session_ctx("s", retain_on_unpack=True):
        loss = call(lambda t: layer(t).sin(), x).sum()
    clear_recompute_session("s")
    dx, nothing = torch.autograd.grad(loss, [x, handles[0].backward_trigger])
    assert nothing.shape == (0,)
    want = torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()])
    assert_same([dx, layer.weight.grad, layer.bias.grad], list(want))


def test_dx_leaves_parameters_that_are_arguments_alone_whatever_is_asked():
    """Rule 36: with phase "dx" a whole backward gives activations only; dw returns the rest."""
    weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    with reentrant_checkpoint_scope([weight]) as handles:
        loss = call(lambda t, w: (t @ w).sin(), x, weight).sum()
    set_phase(handles, "dx")
    loss.backward(retain_graph=True)
    assert weight.grad is None
    set_phase(handles, "dw")
    dw, _ = torch.autograd.grad(loss, [weight, handles[0].backward_trigger])
    assert_same([x.grad, dw], list(torch.autograd.grad((x @ weight).sin().sum(), [x, weight])))


def test_a_value_that_changes_between_dx_and_dw_is_refused():
    """Rule 4: as plain autograd refuses it; behind hooks autograd itself checks no versions."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    h = x * 1
    with reentrant_checkpoint_scope(layer.parameters()) as handles:
        loss = call(layer, h).sum()
    set_phase(handles, "dx")
    torch.autograd.grad(loss, x, retain_graph=True)
    with torch.no_grad():
        h.zero_()
    set_phase(handles, "dw")
    with pytest.raises(regrow.ValueChangedError, match="saved tensor"):
        torch.autograd.grad(loss, handles[0].backward_trigger)


def test_a_changed_weight_is_refused_in_a_session_too():
    """Rule 24: the watch sees what is saved into slots."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    with recompute_session_ctx("s", retain_on_unpack=True):
        loss = call(lambda t: layer(t).sin(), x).sum()
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(regrow.StateChangedError, match="weight"):
            loss.backward()
    clear_recompute_session("s")


def test_prefire_before_forward_has_returned_is_refused():
    """Rule 21."""
    with recompute_handle_collector_ctx() as handles, pytest.raises(RuntimeError, match="has not returned yet"):
        call(lambda x: recompute_handle(handles[0], "s"), torch.randn(3, requires_grad=True))
    assert handles == []


def test_a_session_that_its_own_replay_clears_is_not_filled(counted):
    """Rule 11: this backward is right all the same, and nothing is left."""

    def function(x):
        if regrow.is_recomputing():
            clear_recompute_session("s")
        return x.sin()

    region, x = counted(function), torch.randn(3, requires_grad=True)
    with recompute_session_ctx("s", retain_on_unpack=True):
        loss = call(region, x).sum()
        frame = loss.grad_fn.next_functions[0][0].frame
        loss.backward(retain_graph=True)
    assert (frame.graphs, frame.replays, region.runs) == ({}, {}, 2)
    assert_same(x.grad, x.detach().cos())


def test_a_handle_knows_what_its_replay_holds_and_lets_go_of_what_only_dx_reads():
    """Rule 29: bytes of what the replay saved, by storage; nothing before and nothing after."""
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(4, 4, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        out = call(lambda t: layer(t.sin()).exp(), x)
    frame = handles[0]._frame()
    assert frame.held("s") == {}
    recompute_handle(handles[0], "s")
    owner = frame.bound
    before = sum(frame.held(owner).values())
    with recompute_session_ctx("s", retain_on_unpack=True):
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert frame.watch(owner)() == frozenset()
        frame.trim(owner, frozenset())
        # x, which sin saved, and exp are gone; the product is a joint, and keeps sin(x) and the weight.
        assert (before, sum(frame.held(owner).values())) == (4 * 64, 2 * 64)
        (again,) = torch.autograd.grad(out.sum() * 2, x, retain_graph=True)  # one more replay, and right
    y = x.detach().requires_grad_()
    layer(y.sin()).exp().sum().backward()
    assert_same(again, y.grad * 2)
    clear_recompute_session("s")
    frame.trim(owner, frozenset())
    assert frame.held(owner) == {}


def test_outputs_without_a_gradient_start_nothing():
    """Rule 29: a whole backward and both halves through one output of two, the other of which needs no gradient."""

    def function(t):
        return t.detach() * 2, t.sin()

    for phases in ((), ("dx", "dw")):
        x = torch.randn(3, requires_grad=True)
        with reentrant_checkpoint_scope([]) if phases else recompute_handle_collector_ctx() as handles:
            constant, wave = call(function, x)
        loss = constant.sum()
        for phase in phases:
            handles[0].set_phase(phase)
            found = torch.autograd.grad(loss, [x, handles[0].backward_trigger], retain_graph=True, allow_unused=True)
            assert (found[0], found[1].shape) == (None, (0,))
        if not phases:
            loss.backward(retain_graph=True)
            assert x.grad is None
            wave.sum().backward()
            assert_same(x.grad, x.detach().cos())
