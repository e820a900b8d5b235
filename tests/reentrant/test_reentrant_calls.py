"""The engine on an autograd Function in ordinary use: what it takes, what it gives, and what it refuses."""

from __future__ import annotations

import gc
from collections import namedtuple
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

import regrow
from regrow import CheckpointError, InputChangedError, ReplayMismatchError
from tests.conftest import SEED, assert_same, plain

call = partial(regrow.checkpoint, use_reentrant=True)


def both(program):
    """What a program gives with the plain call, and with the checkpoint."""
    torch.manual_seed(SEED)
    want = program(plain)
    torch.manual_seed(SEED)
    got = program(call)
    assert_same(got, want)
    return got


def leaf(*shape):
    return torch.randn(*(shape or (3,)), requires_grad=True)


Pair = namedtuple("Pair", "left right")


class Unknown:
    """A container that torch's pytree does not know."""

    def __init__(self, value):
        self.value = value


def test_tensors_anywhere_in_arguments_get_gradients_and_outputs_keep_their_containers():
    """Rule 1: lists, dicts, tuples, keywords, None and numbers, in and out."""

    def function(parts, scale, *, extra, flag=None):
        a, b = parts["a"], parts["b"][0]
        return {"one": (a * b).sin() * scale, "more": [Pair(a.exp(), extra["x"].tanh()), None, flag, (a > 0)]}

    def program(run):
        a, b, x = leaf(), leaf(), leaf()
        out = run(function, {"a": a, "b": [b, 2]}, 3.0, extra={"x": x}, flag="f")
        loss = out["one"].sum() + out["more"][0].left.sum() + out["more"][0].right.square().sum()
        loss.backward()
        return out["more"][1:], [t.grad for t in (a, b, x)]

    both(program)


def test_a_tensor_that_is_given_twice_gets_one_gradient_in_plain_order():
    """Rule 1: one leaf of the replay stands for both, so that nothing is added up in another order."""

    def program(run):
        x = leaf(5)
        h = x * 1.1
        run(lambda a, b: (a.sin() * b).exp() + a * b.cos(), h, h).sum().backward()
        return x.grad

    both(program)


def test_parameters_that_are_captured_get_gradients_though_no_input_needs_one(counted):
    """Rule 1: the output needs a gradient, and one replay gives it."""
    region = counted(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)))

    def program(run):
        region.function.zero_grad()
        region.runs = 0
        out = run(region, torch.ones(5, 3))
        assert out.requires_grad
        out.square().sum().backward()
        return [p.grad.clone() for p in region.function.parameters()]

    both(program)
    assert region.runs == 2


class Hidden:
    """Holds a parameter where no look around finds it."""

    def __init__(self):
        self.box = {"deep": [Unknown(torch.full((3,), 2.0, requires_grad=True))]}

    def weight(self):
        return self.box["deep"][0].value

    def __call__(self, x):
        return (x * self.weight()).sin()


def test_a_parameter_out_of_sight_is_found_by_what_forward_records():
    """Rule 1: where nothing in sight needs a gradient, forward records, and tells."""

    def program(run):
        hidden = Hidden()
        out = run(hidden, torch.ones(3))
        assert out.requires_grad
        out.sum().backward()
        return hidden.weight().grad

    both(program)


def test_where_nothing_needs_a_gradient_the_call_is_plain(counted):
    """Rule 2: one execution, no handle, an output without gradient; the graph of a frozen model grows no node."""
    region = counted(nn.Linear(3, 3).requires_grad_(False))
    with regrow.recompute_handle_collector_ctx() as handles:
        out = call(region, torch.ones(3))
    assert (out.requires_grad, region.runs, handles) == (False, 1, [])


def test_forward_records_nothing_and_keeps_no_activation(gc_off, track):
    """Rule 12: between forward and backward only the input is alive."""

    def function(x):
        h = track(x.sin())
        h = track(h.exp())
        return h.cos()

    out = call(function, leaf())
    assert (track.seen, track.alive) == (2, 0)
    out.sum().backward()
    assert (track.seen, track.alive) == (4, 0)


def test_one_forward_one_replay_and_a_backward_that_is_kept_replays_again(counted):
    """Rule 6: as the other engine; without ``retain_graph`` the call is over."""
    region, x = counted(torch.sin), leaf()
    out = call(region, x).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert region.runs == 3
    assert torch.equal(x.grad, 2 * x.detach().cos())
    with pytest.raises(RuntimeError, match=r"backward through the graph a second time|was released"):
        out.backward()


def test_after_backward_the_inputs_are_let_go_though_the_output_lives(gc_off):
    """Rule 11: what a graph lets go after backward, the call does as well."""
    x = leaf()
    h = x * 2
    out = call(torch.sin, h)
    held = StorageWeakRef(h.untyped_storage())
    del h
    assert not held.expired()
    out.sum().backward()
    assert held.expired()
    with pytest.raises(RuntimeError, match=r"torch.sin|sin: this checkpointed call was released"):
        out.sum().backward()


@pytest.mark.parametrize("kind", ["output lives", "output dies"])
def test_no_cycle_keeps_a_tensor(gc_off, track, kind):
    """Rule 12: neither backward nor a dropped output leaves anything to the collector."""
    layer = nn.Linear(3, 3)

    def function(x):
        return track(layer(track(x.sin()))).exp()

    out = call(function, leaf(2, 3))
    if kind == "output lives":
        out.sum().backward()
    frame = out.grad_fn.frame
    dies = StorageWeakRef(frame.environment.cpu_rng.untyped_storage())
    del out, frame
    assert (track.alive, dies.expired()) == (0, True)
    assert gc.collect() >= 0


def test_random_numbers_of_the_replay_are_forwards_and_the_callers_do_not_move():
    """Rule 3."""

    def program(run):
        x = leaf(100)
        out = run(lambda t: torch.dropout(t, 0.5, True) * torch.rand(100), x)
        torch.rand(7)
        state = torch.get_rng_state()
        out.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        return out.detach(), x.grad

    both(program)


def test_without_preserved_random_numbers_the_replay_draws_anew():
    """Rule 3: ``preserve_rng_state=False`` skips both saving and restoring."""
    x = leaf(100)
    out = call(lambda t: torch.dropout(t, 0.5, True), x, preserve_rng_state=False)
    state = torch.get_rng_state()
    out.sum().backward()
    assert not torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(x.grad != 0, out.detach() != 0)


def test_a_weight_that_autocast_casts_in_forward_keeps_its_gradient_outside():
    """Rule 1: what is cast without a graph is not found by later code of the same autocast region."""

    def program(run):
        layer = nn.Linear(4, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = run(lambda t: layer(t).float().sin(), torch.ones(2, 4))
            outside = layer(torch.ones(2, 4))
        outside.float().sum().backward()
        first = layer.weight.grad.clone()
        inside.sum().backward()
        return first, layer.weight.grad

    both(program)


def test_backward_inside_the_same_autocast_region_leaves_its_casts_alone():
    """Rule 3: a replay neither finds the caller's cast weights, which have a graph of their own, nor leaves some."""

    def program(run):
        layer, x = nn.Linear(4, 4), leaf(2, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            warm = layer(x)
            out = run(lambda t: layer(t).float().sin(), x)
            out.sum().backward()
            again = layer.weight.grad.clone()
            warm.float().sum().backward()
        return again, layer.weight.grad, x.grad

    both(program)


def with_view(y):
    return y, y.t()


OUTPUTS = {
    "view of the input": lambda x: (x.view(-1), x.sin()),
    "the input": lambda x: (x, x.cos()),
    "one tensor twice": lambda x: (x.sin(),) * 2,
    "a result and a view of it": lambda x: with_view(x.exp()),
    "an integer, a bool, a float": lambda x: (x.argmax(), x > 0, x.tanh()),
    "a view of a result": lambda x: (x.exp().view(-1), x.sin().t()),
    "complex": lambda x: (torch.view_as_real(torch.fft.fft(x)), x.sin()),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_every_kind_carry_their_gradients(kind):
    """Rule 1: each output on its own, and all together."""

    def program(run):
        found = []
        for wanted in ((0,), (1,), (-1,), (0, 1, -1)):
            x = leaf(2, 3)
            out = run(OUTPUTS[kind], x * 1)
            chosen = [out[index] for index in wanted if out[index].is_floating_point()]
            if chosen:
                sum(part.square().sum() for part in chosen).backward()
            found.append(x.grad)
        return found

    both(program)


def test_outputs_that_are_no_numbers_need_no_gradient():
    """Rule 1: integers and truth values are marked as having none."""
    whole, truth, real = call(lambda x: (x.argmax(), x > 0, x.tanh()), leaf())
    assert [whole.requires_grad, truth.requires_grad, real.requires_grad] == [False, False, True]


def test_a_captured_tensor_that_is_returned_is_not_changed_by_it():
    """Rule 1: autograd writes history into outputs, so what the function did not make is given as an alias."""
    table, weight = torch.ones(3), leaf()
    out, mine, theirs = call(lambda x: (x * weight, weight, table), leaf())
    (out.sum() + (mine * 3).sum() + theirs.sum()).backward()
    assert (table.requires_grad, table.grad_fn, weight.is_leaf) == (False, None, True)
    assert mine is not weight


@pytest.mark.parametrize("function", [lambda x: x, lambda x: x.view(-1), lambda x: with_view(x.exp())[1]])
def test_an_output_may_be_changed_in_place_as_far_as_its_gradient_stays_right(function):
    """Rule 1: autograd refuses it where the output is a view of something that has a graph; else it is right."""
    x = leaf(2, 2)
    h = x * 1
    out = call(function, h)
    try:
        out.mul_(2)
    except RuntimeError as refused:
        assert "view" in str(refused)  # noqa: PT017
        return
    out.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().exp())


def test_an_output_that_is_new_may_be_changed_in_place():
    """Rule 1: by ``relu_`` behind the call, for instance."""

    def program(run):
        x = leaf(6)
        run(lambda t: (t.sin() * 2).view(2, 3), x).relu_().sum().backward()
        return x.grad

    both(program)


class Outcome(Unknown):
    """Not registered with torch's pytree."""


REFUSED = {
    "no tensor": (lambda x: None, "holds no tensor"),
    "no tensor in a list": (lambda x: [1, "two"], "holds no tensor"),
    "a tensor out of sight": (lambda x: (x, Outcome(x * 2)), "returned a Outcome with tensors inside"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_output_whose_gradient_would_be_lost_is_refused(kind):
    """Rule 19: with what to return instead, and without a handle left."""
    function, says = REFUSED[kind]
    with regrow.recompute_handle_collector_ctx() as handles, pytest.raises(ValueError, match=says):
        call(function, leaf())
    assert handles == []


def test_a_captured_tensor_with_a_graph_of_its_own_is_refused_by_name():
    """Rule 19: backward would run through the graph outside; as an argument it is right."""
    weight = leaf()
    derived = weight * 2
    with pytest.raises(ValueError, match=r"captures 'derived'.*Pass it as an argument"):
        call(lambda x: (x * derived).sin(), leaf())

    def program(run):
        x, w = leaf(), leaf()
        run(lambda t, d: (t * d).sin(), x, w * 2).sum().backward()
        return x.grad, w.grad

    both(program)


def test_calls_do_not_nest():
    """Rule 15: in forward and in a replay, by the name of the inner function."""

    def outer(x):
        with torch.enable_grad():
            return call(torch.sin, x)

    with pytest.raises(ValueError, match=r"sin: a checkpoint with use_reentrant=True inside another"):
        call(outer, leaf())
    assert call(torch.sin, leaf()).requires_grad  # the refusal leaves no mark


@pytest.mark.parametrize("order", ["hooks inside", "hooks around"])
def test_calls_of_the_two_engines_nest(order, counted):
    """Rule 15: either way round, with random numbers and captured parameters."""
    layer = nn.Linear(4, 4)

    def program(run):
        layer.zero_grad()
        inner = run if order == "hooks around" else (plain if run is plain else regrow.checkpoint)
        outer = (plain if run is plain else regrow.checkpoint) if order == "hooks around" else run
        x = leaf(2, 4)
        outer(lambda t: inner(lambda u: torch.dropout(layer(u), 0.5, True).tanh(), t.sin()).exp(), x).sum().backward()
        return x.grad, layer.weight.grad.clone()

    both(program)


def test_an_input_that_the_function_overwrites_is_refused_at_once():
    """Rule 4: later uses of it would have a wrong gradient, and nothing would notice."""
    x = leaf()
    h = x * 1
    with pytest.raises(InputChangedError, match="argument 0"):
        call(lambda t: t.mul_(2).sin(), h)


def test_an_input_that_changes_between_forward_and_backward_is_refused():
    """Rule 4: before anything accumulates."""
    layer, x = nn.Linear(3, 3), leaf(3)
    h = x * 1
    out = call(lambda t: layer(t.sin()), h)
    with torch.no_grad():
        h.zero_()
    with pytest.raises(InputChangedError, match="argument 0"):
        out.sum().backward()
    assert (x.grad, layer.weight.grad) == (None, None)


def test_a_parameter_that_changes_between_forward_and_backward_is_refused():
    """Rule 24: the replay reads it."""
    layer = nn.Linear(3, 3)
    out = call(layer, leaf(3))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(regrow.StateChangedError, match="weight"):
        out.sum().backward()


REPLAYS = {
    "fewer outputs": (lambda x, n: (x.sin(), x.cos())[: 2 if n == 1 else 1], "forward returned 2"),
    "another shape": (lambda x, n: x.sin() if n == 1 else x.sin()[:1], r"output 0: forward \(\(3,\)"),
    "another type": (lambda x, n: x.sin() if n == 1 else x.double().sin(), "torch.float64"),
}


@pytest.mark.parametrize("kind", REPLAYS)
def test_a_replay_with_other_outputs_is_refused(kind):
    """Rule 4: number, shape, dtype and device; nothing accumulates."""
    function, says = REPLAYS[kind]
    runs = []

    def counting(x):
        runs.append(None)
        return function(x, len(runs))

    x = leaf()
    out = call(counting, x)
    with pytest.raises(ReplayMismatchError, match=says):
        sum(part.sum() for part in (out if isinstance(out, tuple) else [out])).backward()
    assert x.grad is None


def test_without_the_check_only_the_number_of_outputs_counts():
    """Rule 4: ``determinism_check="none"`` leaves the rest to autograd, which sums up what was broadcast."""
    runs = []

    def function(x):
        runs.append(None)
        return x.sin() if len(runs) == 1 else x.sin().double()

    x = leaf()
    call(function, x, determinism_check="none").sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.parametrize("how", ["create_graph", "vmap"])
def test_gradients_that_would_need_a_graph_are_refused(how):
    """Rule 1: a second derivative that is silently missing is a wrong gradient."""
    x = leaf()
    out = call(torch.sin, x)

    def batched():
        return torch.func.vmap(lambda v: torch.autograd.grad(out, x, v)[0])(torch.eye(3))

    backward = batched if how == "vmap" else lambda: out.sum().backward(create_graph=True)
    with pytest.raises(CheckpointError, match="second derivatives"):
        backward()


def test_a_backward_that_fails_releases_the_call(gc_off, track):
    """Rule 11: nothing of it is left, and a second backward says so."""
    fail = []

    def function(x):
        h = track(x.sin())
        if fail:
            raise KeyError("replay")
        return h.exp()

    x = leaf()
    out = call(function, x)
    fail.append(True)
    with pytest.raises(KeyError):
        out.sum().backward()
    fail.clear()
    assert track.alive == 0
    with pytest.raises(RuntimeError, match="a backward that failed"):
        out.sum().backward()


def test_hooks_of_a_captured_parameter_fire_once_per_call_that_captures_it():
    """Rule 35: each call accumulates by itself; plain autograd and the other engine fire them once."""
    layer, fired = nn.Linear(3, 3, bias=False), []
    layer.weight.register_hook(lambda grad: fired.append("tensor"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    call(layer, call(layer, leaf(3))).sum().backward()
    assert fired == ["tensor", "accumulated"] * 2


def test_a_parameter_inside_and_outside_of_calls_gets_both_gradients():
    """Rule 35: equal up to the order in which they are added."""

    def program(run):
        layer, x = nn.Linear(3, 3), leaf(2, 3)
        run(lambda t: layer(t).sin(), layer(run(lambda t: layer(t).tanh(), x))).sum().backward()
        return x.grad, layer.weight.grad, layer.bias.grad

    torch.manual_seed(SEED)
    want = program(plain)
    torch.manual_seed(SEED)
    torch.testing.assert_close(program(call), want)


class Net(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.first, self.second, self.shared = nn.Linear(4, 4), nn.Linear(4, 4), shared

    def forward(self, x, run):
        h = run(lambda t: self.first(t).tanh(), x)
        return run(lambda t: self.second(t).sin() + (self.first(t) if self.shared else 0), h)


@pytest.mark.parametrize("shared", [False, True])
def test_distributed_data_parallel(one_rank, shared):
    """Rule 35: DDP counts each parameter's gradient once; one that calls share needs ``static_graph``."""
    from torch.nn.parallel import DistributedDataParallel

    def train(run):
        torch.manual_seed(SEED)
        net = DistributedDataParallel(Net(shared), static_graph=shared)
        for _ in range(3):
            net.zero_grad()
            net(torch.randn(3, 4), run).square().sum().backward()
        return [p.grad for p in net.parameters()]

    torch.testing.assert_close(train(call), train(plain))


class InsideAndOutside(Net):
    def forward(self, x, run):
        return self.first(run(lambda t: self.first(t).tanh(), x))


@pytest.mark.parametrize("kind", [partial(Net, shared=True), partial(InsideAndOutside, shared=True)])
def test_distributed_data_parallel_says_what_shared_parameters_need(one_rank, kind):
    """Rule 35: DDP would reduce the first part of such a gradient, and each rank would keep its own second part."""
    from torch.nn.parallel import DistributedDataParallel

    net = DistributedDataParallel(kind())
    with pytest.raises(CheckpointError, match=r"parameter first.*static_graph=True"):
        net(torch.randn(3, 4), call).square().sum().backward()
    net = DistributedDataParallel(kind())
    with net.no_sync():
        net(torch.randn(3, 4), call).square().sum().backward()  # nothing is reduced here


def test_wrappers_take_the_engine():
    """Rule 17: a wrapped module, its copies, and a decorated function."""
    import copy

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    oracle = copy.deepcopy(model)
    regrow.apply_checkpointing(model, nn.Linear, use_reentrant=True)
    mine = copy.deepcopy(model)
    x = torch.ones(2, 3)
    out = mine(x)
    assert type(out.grad_fn.next_functions[0][0]).__name__ == "RecomputedBackward"
    out.sum().backward()
    oracle(x).sum().backward()
    assert_same([p.grad for p in mine.parameters()], [p.grad for p in oracle.parameters()])


@pytest.mark.filterwarnings("ignore")
def test_while_torch_traces_it_is_torchs_checkpoint():
    """Rule 22: a tracer sees the whole backward, so the engine makes no difference."""

    def function(x, w):
        return call(lambda t, u: (t @ u).sin(), x, w).sum()

    def program(run):
        x, w = leaf(3, 3), leaf(3, 3)
        run(function)(x, w).backward()
        return x.grad, w.grad

    torch.manual_seed(SEED)
    want = program(lambda f: f)
    torch.manual_seed(SEED)
    torch.testing.assert_close(program(partial(torch.compile, fullgraph=True, backend="aot_eager")), want)


class Stateful(nn.Module):
    """Leaves a tensor with a graph where the next call, or the loss, would use it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(3, 3)
        self.register_buffer("state", torch.zeros(3))
        self.note = Unknown(None)

    def forward(self, x, cache):
        h = self.layer(x)
        if self.kind == "buffer":
            self.state = h
        elif self.kind == "attribute":
            self.balance = h.square().sum()
        elif self.kind == "list":
            cache.append(h)
        return h.sin()


@pytest.mark.parametrize(
    ("kind", "says"),
    [("buffer", "Stateful.state"), ("attribute", "Stateful.balance"), ("list", "an argument")],
)
def test_a_graph_that_is_left_elsewhere_than_in_the_output_is_refused(kind, says):
    """Rule 35: forward had none there, so a gradient through it is missing, and nothing else would notice."""
    module = Stateful(kind)
    out = call(module, leaf(3), [])
    with pytest.raises(CheckpointError, match=f"needs a gradient in {says}.*store it detached"):
        out.sum().backward()
    assert module.layer.weight.grad is None


def test_weights_that_a_hook_computes_are_no_such_graph():
    """Rule 35: old-style spectral norm leaves its weight as an attribute, and computes it anew each time."""

    def program(run):
        layer = nn.utils.spectral_norm(nn.Linear(3, 3))
        x = leaf(2, 3)
        run(lambda t: layer(t).sin(), x).sum().backward()
        return x.grad, layer.weight_orig.grad, layer.weight_u

    both(program)


def test_a_buffer_that_needs_a_gradient_is_refused():
    """Rule 35: a replay runs on a copy of it."""
    layer = nn.Linear(3, 3)
    layer.register_buffer("scale", leaf(3))
    with pytest.raises(ValueError, match=r"buffer Linear.scale.*Make it a parameter"):
        call(layer, leaf(3))


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def test_weights_that_are_cached_around_a_call_keep_their_graph():
    """Rule 35: ``parametrize.cached()``: what forward computes without a graph is not found by code behind it."""

    def program(run):
        layer, x = nn.Linear(3, 3), leaf(2, 3)
        parametrize.register_parametrization(layer, "weight", Symmetric())
        with parametrize.cached():
            out = run(lambda t: layer(layer(t).sin()), x)
            behind = layer(x).sin()
            out.sum().backward()  # a replay inside the cache
        behind.sum().backward()
        return x.grad.clone(), *[p.grad.clone() for p in layer.parameters()]

    torch.manual_seed(SEED)
    layer, x = nn.Linear(3, 3), leaf(2, 3)  # the oracle: backward through a cached weight twice needs one cache each
    parametrize.register_parametrization(layer, "weight", Symmetric())
    (layer(layer(x).sin()).sum() + layer(x).sin().sum()).backward()
    torch.manual_seed(SEED)
    torch.testing.assert_close(program(call), (x.grad, *[p.grad for p in layer.parameters()]))
