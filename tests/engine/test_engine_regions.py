"""SAVE regions: run once in forward, gone around in replays, and never a wrong number."""

import copy
import pickle
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

from regrow import (
    CheckpointError,
    PlaceholderError,
    RegionError,
    ValueChangedError,
    checkpoint_exclude_wrapper,
    clear_recompute_session,
    is_recomputing,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
    save_region,
)

Pair = namedtuple("Pair", ["first", "second"])


def leaves(*shapes):
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def grads_of(out, *inputs):
    """Gradients of a whole backward, which every engine takes."""
    for tensor in inputs:
        tensor.grad = None
    out.sum().backward()
    return tuple(tensor.grad for tensor in inputs)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """A block with attention as a region, and counters for both."""

    def __init__(self, width=8, dropout=0.0, *, region=True, save_output=True):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = dropout
        self.runs = self.attended = 0
        self.attend = (
            checkpoint_exclude_wrapper(self.attend_counted, save_output=save_output) if region else self.attend_counted
        )

    def attend_counted(self, q, k, v):
        self.attended += 1
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)

    def forward(self, x):
        self.runs += 1
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        attended = F.dropout(self.attend(q, k, v), self.dropout)
        return x + F.dropout(self.out(attended).tanh(), self.dropout)


def two_of(dropout=0.0, **kwargs):
    """A model with regions and the same without."""
    torch.manual_seed(0)
    mine = Attention(dropout=dropout, **kwargs)
    torch.manual_seed(0)
    return mine, Attention(dropout=dropout, region=False)


# It runs once.


def test_a_region_runs_once_and_the_rest_twice(engine, same):
    """Rule 28: forward runs everything, the replay everything but the region; gradients are plain."""
    mine, plain = two_of()
    x, y = (torch.randn(2, 5, 8).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    engine.checkpoint(mine, x).sum().backward()
    plain(y).sum().backward()
    assert (mine.runs, mine.attended) == (2, 1)
    same([x.grad, *[p.grad for p in mine.parameters()]], [y.grad, *[p.grad for p in plain.parameters()]])


@pytest.mark.only("hooks", because="the other engine gives gradients of parameters by accumulation")
@pytest.mark.parametrize("prefired", [False, True])
def test_a_region_in_a_session(engine, prefired, same):
    """Rule 28: prefire goes around it, dx and dw share the replay, and clear leaves it what it keeps."""
    mine, plain = two_of(dropout=0.3)
    x = torch.randn(2, 5, 8)
    for _ in range(2):  # the name is used again
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        mine.runs = mine.attended = 0
        torch.manual_seed(1)
        with recompute_session_ctx("s", retain_on_unpack=True), recompute_handle_collector_ctx() as handles:
            out = engine.checkpoint(mine, a).sum()
            if prefired:
                recompute_handle(handles[0], "s")
                assert (mine.runs, mine.attended) == (2, 1)
            dx = torch.autograd.grad(out, a, retain_graph=True)
        with recompute_session_ctx("s"):
            dw = torch.autograd.grad(out, list(mine.parameters()), retain_graph=True)
        clear_recompute_session("s")
        assert (mine.runs, mine.attended) == (2, 1)
        again = torch.autograd.grad(out, [a, *mine.parameters()])
        assert (mine.runs, mine.attended) == (3, 1)
        torch.manual_seed(1)
        want = torch.autograd.grad(plain(b).sum(), [b, *plain.parameters()])
        same([*dx, *dw], list(want))
        same(list(again), list(want))


@pytest.mark.only("hooks", because="the other engine gives gradients of parameters by accumulation")
def test_one_session_after_another(engine, same):
    """Rule 28: any number of sessions and backwards read one region."""
    mine, plain = two_of()
    x = torch.randn(2, 5, 8, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        out = engine.checkpoint(mine, x).sum()
    found = []
    for name in ("first", "second"):
        with recompute_session_ctx(name, retain_on_unpack=True):
            recompute_handle(handles[0], name)
            found.append(torch.autograd.grad(out, [x, *mine.parameters()], retain_graph=True))
        clear_recompute_session(name)
    found.append(torch.autograd.grad(out, [x, *mine.parameters()], retain_graph=True))
    want = torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])
    for grads in found:
        same(grads, want)
    assert (mine.runs, mine.attended) == (4, 1)
    torch.autograd.grad(out, x)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)


@pytest.mark.only("hooks", because="the other engine lets a call go whose backward failed")
def test_a_replay_that_raised_leaves_the_region_whole(engine, same):
    """Rule 28: after a failed replay another backward finds what the region keeps."""
    mine, plain = two_of()
    fail = [False]

    def block(x):
        out = mine(x)
        if fail[0]:
            raise KeyError("on purpose")
        return out.sin().cos()

    x = torch.randn(2, 5, 8, requires_grad=True)
    out = engine.checkpoint(block, x).sum()
    fail[0] = True
    with pytest.raises(KeyError):
        torch.autograd.grad(out, x, retain_graph=True)
    fail[0] = False
    got = torch.autograd.grad(out, [x, *mine.parameters()])
    same(got, torch.autograd.grad(plain(x).sin().cos().sum(), [x, *plain.parameters()]))
    assert mine.attended == 1


@pytest.mark.only("hooks", because="the other engine runs whole first-order backwards")
def test_partial_and_second_order_backwards(same_grads):
    """Rule 28: partial gradients, and gradients of gradients, go through a region."""

    def program(call):
        x, w, b = leaves((4, 4), (4, 4), (4,))
        out = call(lambda t: save_region(lambda a: (a @ w).sin() + b, t.tanh()).exp(), x)
        only_w = torch.autograd.grad(out.sum(), w, retain_graph=True)
        first = torch.autograd.grad(out.sum(), [x, w], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, w, b], allow_unused=True)
        return only_w, first, second

    same_grads(program)


@pytest.mark.only("hooks", because="the other engine runs whole backwards")
def test_a_region_on_a_foreign_thread(engine, same):
    """Rule 28: backward on a thread without the caller's context goes around the region, too."""
    from tests.conftest import run_on_thread

    mine, plain = two_of(dropout=0.2)
    x = torch.randn(2, 5, 8, requires_grad=True)
    torch.manual_seed(3)
    out = engine.checkpoint(mine, x).sum()
    got = run_on_thread(lambda: torch.autograd.grad(out, [x, *mine.parameters()]))
    torch.manual_seed(3)
    same(got, torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()]))
    assert (mine.runs, mine.attended) == (2, 1)


def test_outside_a_checkpoint_a_region_is_a_plain_call(counted):
    """Rule 28: a region outside a checkpointed call, or inside another region, changes nothing."""
    inner = counted(torch.sin)
    outer = counted(lambda t: save_region(inner, t).cos())
    x = torch.randn(3, requires_grad=True)
    grads = grads_of(save_region(outer, x), x)
    assert torch.equal(grads[0], grads_of(x.sin().cos(), x)[0])
    assert (outer.runs, inner.runs) == (1, 1)
    with torch.no_grad():
        assert not save_region(outer, x).requires_grad


def test_regions_inside_regions_run_once(engine, counted, same):
    """Rule 28: a region inside a region belongs to that."""
    inner = counted(torch.sin)
    outer = counted(lambda t: save_region(inner, t.exp()).cos())
    x = torch.randn(3, requires_grad=True)
    got = grads_of(engine.checkpoint(lambda t: save_region(outer, t.tanh()).sin(), x), x)
    assert (outer.runs, inner.runs) == (1, 1)
    same(got, grads_of(x.tanh().exp().sin().cos().sin(), x))


@pytest.mark.only("hooks", because="the other engine replays whole functions")
def test_early_stop_at_a_region(engine, counted):
    """Rule 28: a region that saves last ends the replay where it stands."""
    after = counted(lambda t: t + 1)
    body = counted(torch.sin)
    x = torch.randn(3, requires_grad=True)
    out = engine.checkpoint(lambda t: after(save_region(body, t.exp()) * 2), x)
    grads_of(out, x)
    assert (body.runs, after.runs) == (1, 1)


@pytest.mark.parametrize("early_stop", [True, False])
def test_many_regions_in_a_loop(same_grads, early_stop):
    """Rule 28: one function may be a region any number of times."""

    def program(call):
        x, w = leaves((4, 4), (4, 4))

        def block(t):
            for k in range(5):
                t = save_region(torch.matmul, t.sin(), w).tanh() if k % 2 else save_region(torch.tanh, t) * t
            return t

        return grads_of(call(block, x), x, w)

    same_grads(program, early_stop=early_stop)


# What goes in and out.


def several(t):
    return t.exp(), t.cos()


def nest(t):
    return {"a": [t.exp(), 3, None], "b": Pair(t.sin(), "text"), "c": (t.argmax(), t.detach())}


def test_several_outputs(same_grads):
    """Rule 28: outputs are any number of tensors."""

    def program(call):
        (x,) = leaves((4,))

        def block(t):
            a, b = save_region(several, t.sin())
            return a.sin() * b.exp()

        return grads_of(call(block, x), x)

    same_grads(program)


def test_nested_outputs(same_grads):
    """Rule 28: containers, numbers, text, None, integer tensors and detached ones come back as they were."""

    def program(call):
        (x,) = leaves((4,))
        seen = []

        def block(t):
            found = save_region(nest, t.sin())
            a, number, nothing = found["a"]
            index, stopped = found["c"]
            seen.append((number, nothing, found["b"].second, index.dtype, index.requires_grad, stopped.requires_grad))
            found["a"].append("a container of the caller's own")
            return a.sin() * found["b"].first.cos() * number * stopped.exp() + index

        grads = grads_of(call(block, x), x)
        assert len(set(seen)) == 1
        return grads

    same_grads(program)


OUTPUTS = {
    "the input": lambda t: t,
    "a view of the input": lambda t: t.view(2, 2).t(),
    "the input without gradient": lambda t: t.detach(),
    "a part of the input": lambda t: t[1:],
    "input and result": lambda t: (t, t.exp())[0],
    "views of one result": lambda t: torch.stack(t.exp().chunk(2)),
    "an expanded result": lambda t: t.exp().sum().expand(4),
    "no gradient": lambda t: t.argsort().double(),
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_that_are_inputs_or_views(same_grads, output):
    """Rule 28: an output may be an input, or a view of one."""

    def program(call):
        x = torch.randn(4, dtype=torch.float64, requires_grad=True)
        return grads_of(call(lambda t: save_region(output, t.sin()).exp().sin() * t.cos().sum(), x), x)

    same_grads(program)


def test_an_output_that_is_a_parameter(same_grads):
    """Rule 28: a parameter comes back as itself."""

    def program(call):
        x, w = leaves((4,), (4,))
        return grads_of(call(lambda t: (save_region(lambda a: w, t.sin()) * t.exp()).sin(), x), x, w)

    same_grads(program)


def test_chunks_of_one_result(same_grads):
    """Rule 28: several outputs may be views of one tensor."""

    def program(call):
        (x,) = leaves((4, 6))

        def block(t):
            a, b, c = save_region(lambda u: u.exp().chunk(3, -1), t.sin())
            return (a * b).sin() * c

        return grads_of(call(block, x), x)

    same_grads(program)


def twice(t):
    return t, t


def halves(t):
    return t[:4].view(2, 2), t[4:].view(2, 2)


INPUTS = {
    "views": lambda t: (t.exp().view(4, 2).t(), t.sin()[2:6].view(2, 2)),
    "one tensor twice": lambda t: twice(t.exp().view(2, 4)),
    "parts of one tensor": lambda t: halves(t.exp()),
    "expanded": lambda t: (t.exp().sum().expand(2, 2), t.exp()[::2].view(2, 2)),
}


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_inputs_that_share_memory(same_grads, make):
    """Rule 29: inputs are found by where they lie."""

    def program(call):
        (x,) = leaves((8,))

        def block(t):
            a, b = make(t)
            return save_region(lambda p, q: (p.sin() * p.t().sum()).sum() * q.exp().transpose(0, 1), a, b).sin()

        return grads_of(call(block, x), x)

    same_grads(program)


def test_keyword_arguments_and_containers(same_grads):
    """Rule 28: a region takes what a function takes."""

    def program(call):
        x, y = leaves((4,), (4,))

        def region(a, *, options, scale=1.0):
            return a.exp() * options["mask"].sin() * scale + options["rest"][0].cos()

        def block(t, u):
            return save_region(region, t.sin(), options={"mask": u.tanh(), "rest": [t.exp()]}, scale=0.5).sin()

        return grads_of(call(block, x, y), x, y)

    same_grads(program)


def test_complex_and_conjugate_inputs(same_grads):
    """Rule 29: a conjugate view is no plain view, and right all the same."""

    def program(call):
        x = torch.randn(4, dtype=torch.complex64, requires_grad=True)
        block = lambda t: save_region(lambda a: a.conj() * a.exp(), t.sin()).abs()  # noqa: E731
        return grads_of(call(block, x), x)

    same_grads(program)


def test_jagged_inputs(same_grads):
    """Rule 29: jagged tensors go in and out."""

    def program(call):
        parts = [torch.randn(n, 3, requires_grad=True) for n in (2, 4)]
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).requires_grad_()
        w = torch.randn(3, 3, requires_grad=True)
        out = call(lambda t: save_region(lambda a: (a @ w).sin(), t.tanh()).cos(), jagged)
        out.values().sum().backward()
        return w.grad, jagged.grad.values()

    same_grads(program)


def test_a_router_without_gradient(engine, counted):
    """Rule 28: a region under no_grad runs once, too: a router chooses once."""
    route = counted(lambda t: (t + torch.rand_like(t)).argsort())
    x = torch.randn(6, requires_grad=True)
    chosen = []

    def block(t):
        with torch.no_grad():
            order = save_region(route, t)
        chosen.append(order.tolist())
        return t.exp()[order].sin()

    grads_of(engine.checkpoint(block, x), x)
    assert route.runs == 1
    assert chosen[0] == chosen[1]


@pytest.mark.only(
    "hooks", because="the other engine adds up the gradients of a weight in and outside a region in float32"
)
def test_under_autocast(same_grads):
    """Rule 28: a region under autocast, and a replay outside it."""

    def program(call):
        x, w, v = leaves((4, 4), (4, 4), (4, 4))

        def block(t):
            return save_region(lambda a: (a @ w).sin() @ v, t @ w).exp()

        with torch.autocast("cpu", torch.bfloat16):
            out = call(block, x)
        return grads_of(out, x, w, v)

    same_grads(program)


def test_frozen_parameters_and_hooks(engine, same):
    """Rule 28: frozen parameters stay so, and hooks on the region's parameters fire once."""
    mine, plain = two_of()
    for model in (mine, plain):
        model.qkv.weight.requires_grad_(False)
    seen = []
    mine.out.weight.register_hook(lambda grad: seen.append("hook"))
    mine.out.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    x = torch.randn(2, 5, 8, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    region = checkpoint_exclude_wrapper(mine.out)
    assert region is mine.out
    engine.checkpoint(mine, x).sum().backward()
    plain(y).sum().backward()
    assert seen == ["hook", "accumulated"]
    same([x.grad, *[p.grad for p in mine.parameters()]], [y.grad, *[p.grad for p in plain.parameters()]])


def test_hooks_of_the_user_around(same_grads):
    """Rule 29: what a region keeps passes through save_on_cpu, around the checkpoint and inside it."""

    def program(call):
        x, w = leaves((4, 4), (4, 4))

        def block(t):
            a = save_region(torch.matmul, t.sin(), w).tanh()
            with save_on_cpu():
                return save_region(lambda b: b.exp() @ w, a).cos()

        with save_on_cpu():
            out = call(block, x)
        return grads_of(out, x, w)

    same_grads(program)


# Random numbers.


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_the_next_draw_is_forwards(same_grads, dropout):
    """Rule 28: after a region that drew, the replay draws what forward drew."""

    def program(call):
        (x,) = leaves((64,))

        def block(t):
            t = F.dropout(t.sin(), 0.3)
            t = save_region(lambda a: F.dropout(a.exp(), dropout), t)
            return F.dropout(t, 0.3).cos()

        out = call(block, x)
        return (*grads_of(out, x), torch.rand(1))

    same_grads(program)


def test_a_generator_of_the_users(same_grads):
    """Rule 28: a generator among the arguments stands after the region where forward's stood."""

    def program(call):
        (x,) = leaves((64,))
        generator = torch.Generator().manual_seed(4)

        def noisy(a, source):
            return a * torch.rand(64, generator=source)

        def block(t, source):
            t = save_region(noisy, t.sin(), source)
            return (t * torch.rand(64, generator=source)).exp()

        out = call(block, x, generator)
        return (*grads_of(out, x), torch.rand(1, generator=generator))

    same_grads(program)


# Nesting.


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_in_a_checkpoint_inside_a_checkpoint(engine, counted, same):
    """Rule 28: no replay of either call runs the region; the rest runs as without it."""
    body = counted(lambda t: F.dropout(t.exp(), 0.3))
    inner = counted(lambda t: F.dropout(save_region(body, t.sin()), 0.3).cos())
    outer = counted(lambda t: engine.checkpoint(inner, t.tanh()).exp().sin())
    x = torch.randn(32, requires_grad=True)
    torch.manual_seed(5)
    got = grads_of(engine.checkpoint(outer, x), x)
    assert (body.runs, inner.runs, outer.runs) == (1, 3, 2)
    torch.manual_seed(5)
    plain = lambda t: F.dropout(F.dropout(t.tanh().sin().exp(), 0.3), 0.3).cos().exp().sin()  # noqa: E731
    same(got, grads_of(plain(x), x))


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_a_checkpoint_inside_a_region(engine, counted, same):
    """Rule 28: a checkpoint inside a region is replayed by itself, and the region still runs once."""
    inner = counted(lambda t: t.exp().sin())
    body = counted(lambda t: engine.checkpoint(inner, t * 2).cos())
    outer = counted(lambda t: save_region(body, t.sin()).exp())
    x = torch.randn(8, requires_grad=True)
    got = grads_of(engine.checkpoint(outer, x), x)
    assert (inner.runs, body.runs, outer.runs) == (2, 1, 2)
    same(got, grads_of((x.sin() * 2).exp().sin().cos().exp(), x))


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_a_backward_inside_a_region(engine, counted, same):
    """Rule 28: a gradient taken inside a region is part of it."""

    def body(t):
        (grad,) = torch.autograd.grad(engine.checkpoint(torch.sin, t).sum(), t, create_graph=True)
        return grad * t

    counted_body = counted(body)
    x = torch.randn(8, requires_grad=True)
    got = grads_of(engine.checkpoint(lambda t: save_region(counted_body, t.exp()).sin(), x), x)
    assert counted_body.runs == 1
    y = x.exp()
    same(got, grads_of((y.cos() * y).sin(), x))


@pytest.mark.only("hooks", because="the other engine takes no policy")
def test_with_a_policy_and_with_debug(same_grads):
    """Rule 28: a selective policy and the operator log see nothing of a region."""

    def program(call):
        x, w = leaves((4, 4), (4, 4))

        def block(t):
            t = t @ w
            t = save_region(lambda a: (a @ w).sin() @ w, t.tanh())
            return (t @ w).exp().cos()

        return grads_of(call(block, x), x, w)

    keep = lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default  # noqa: E731
    same_grads(program, policy_fn=keep)
    same_grads(program, debug=True)


# Memory.


def test_the_border_pins_nothing_that_a_replay_makes(engine, track, gc_off):
    """Rule 29: between forward and backward a region holds its output and no input that the replay brings back."""
    inputs, outputs = type(track)(), type(track)()
    w = torch.randn(16, 16, requires_grad=True)

    def body(t):
        return outputs(t @ w)

    def block(t):
        return save_region(body, inputs(F.rms_norm(t, (16,)))).exp()

    x = torch.randn(4, 16, requires_grad=True)
    out = engine.checkpoint(block, x)
    assert (inputs.alive, outputs.alive) == (0, 1)
    out.sum().backward()
    del out
    assert (inputs.seen, inputs.alive, outputs.alive) == (2, 0, 0)


@pytest.mark.only("hooks", because="the other engine runs whole backwards")
def test_everything_goes_with_the_graph(engine, track, gc_off):
    """Rule 29: a dropped graph frees what regions keep, also when it was replayed for a session."""
    w = torch.randn(4, 4, requires_grad=True)

    def block(t):
        a = save_region(lambda u: (track(u.exp()), track(u @ w)), track(t.sin()))
        return save_region(lambda u, v: track(u * v), *a).cos()

    for fate in ("dropped", "dx only", "backward"):
        x = torch.randn(4, 4, requires_grad=True)
        out = engine.checkpoint(block, x)
        if fate == "dx only":
            with recompute_session_ctx("s", retain_on_unpack=True):
                torch.autograd.grad(out.sum(), x, retain_graph=True)
            clear_recompute_session("s")
        elif fate == "backward":
            out.sum().backward()
        del out
        assert track.seen
        assert track.alive == 0, fate


@pytest.mark.only("hooks", because="it counts what slots hold")
def test_clear_drops_what_was_brought_back_and_no_more(engine, track, gc_off):
    """Rule 28: what a region keeps lives until the graph dies; what was rebound for a session ends with it."""
    outputs = type(track)()
    x = torch.randn(4, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        out = engine.checkpoint(lambda t: save_region(lambda u: outputs(u.exp() * u), track(t.sin())).cos(), x)
    recompute_handle(handles[0], "s")
    assert (track.alive, outputs.alive) == (1, 1)
    clear_recompute_session("s")
    assert (track.alive, outputs.alive) == (0, 1)
    grads_of(out, x)


# Outputs that go into another region.


def chain(first, second, between=lambda t: t):
    """RECOMPUTE -> SAVE -> SAVE -> RECOMPUTE."""
    one, two = checkpoint_exclude_wrapper(first, save_output=False), checkpoint_exclude_wrapper(second)
    return lambda t: two(between(one(t.sin())), t.tanh()).cos()


@pytest.mark.parametrize(
    "between",
    [lambda t: t, lambda t: t.view(2, 8), lambda t: t.transpose(0, 1), lambda t: t[1:], lambda t: t.detach()],
    ids=["direct", "viewed", "transposed", "sliced", "detached"],
)
def test_from_region_to_region(engine, counted, track, gc_off, same, between):
    """Rule 29: an output that goes into another region is not kept for the replay, and may be viewed on the way."""
    first = counted(lambda t: t.exp() + 1)
    second = counted(lambda a, b: a.sum() * a.mean().sin() * b)
    x = torch.randn(4, 4, requires_grad=True)
    got = grads_of(engine.checkpoint(chain(first, second, between), x), x)
    assert (first.runs, second.runs) == (1, 1)
    same(got, grads_of(second.function(between(first.function(x.sin())), x.tanh()).cos(), x))


def test_an_output_that_is_not_kept_dies(engine, track, gc_off):
    """Rule 29: without keeping it, nothing holds the output between forward and backward."""
    x = torch.randn(4, 4, requires_grad=True)
    out = engine.checkpoint(chain(lambda t: track(t.exp() + 1), lambda a, b: a.sum() * b), x)
    assert track.alive == 0
    grads_of(out, x)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: t.exp(),
        lambda t: (t.detach() * 2).requires_grad_(),
        lambda t: t @ t,
        lambda t: t.sum() if t.sum() > 0 else t.mean(),
        lambda t: t.clone(),
        lambda t: torch.cat([t, t]),
        lambda t: F.linear(torch.ones(4, 4, requires_grad=True), t),
    ],
)
def test_reading_an_output_that_was_not_kept(engine, use):
    """Rule 30: its values are asked for: an error that names the region, and nothing accumulates."""
    first = checkpoint_exclude_wrapper(lambda t: t.exp(), save_output=False)
    x = torch.randn(4, 4, requires_grad=True)
    out = engine.checkpoint(lambda t: use(first(t.sin())).sin().cos(), x)
    with pytest.raises(PlaceholderError, match="save_output=False does not keep"):
        out.sum().backward()
    assert x.grad is None


# Misuse is found.


def test_a_region_that_writes_into_its_input(engine):
    """Rule 30: refused in forward, naming the argument."""
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(RegionError, match="wrote into state"):
        engine.checkpoint(lambda t: save_region(lambda a, state: a * state.add_(1), t.sin(), state=t.exp()).cos(), x)


@pytest.mark.only("hooks", because="the other engine needs every output")
def test_an_output_that_is_overwritten(engine):
    """Rule 30: refused in forward where a replay needs it, and let pass where none does."""
    x = torch.randn(4, requires_grad=True)

    def block(t):
        return save_region(lambda a: a * 2, t.sin()).add_(1)

    with pytest.raises(RegionError, match="changed in place after the region"):
        engine.checkpoint(lambda t: block(t).exp().sin(), x)
    got = grads_of(engine.checkpoint(block, x), x)
    assert torch.equal(got[0], x.cos() * 2)


def test_an_output_that_is_overwritten_after_forward(engine):
    """Rule 30: refused before the replay gives backward anything."""
    x = torch.randn(4, requires_grad=True)
    kept = []

    def block(t):
        kept.append(save_region(lambda a: a * 2, t.sin()))
        return kept[0].exp().sin()

    out = engine.checkpoint(block, x)
    with torch.no_grad():
        kept[0].add_(1)
    with pytest.raises(RegionError, match="changed in place after the region"):
        out.sum().backward()
    assert x.grad is None


def test_what_a_region_keeps_is_overwritten(engine):
    """Rule 30: as plain autograd, refused when it is read."""
    x, w = leaves((4, 4), (4, 4))
    out = engine.checkpoint(lambda t: save_region(torch.matmul, t.sin(), w).sin(), x)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(ValueChangedError, match="SAVE region kept"):
        out.sum().backward()
    assert x.grad is None


def test_an_input_that_is_overwritten_after_the_region(engine):
    """Rule 30: as plain autograd, refused when it is read."""
    x = torch.randn(4, requires_grad=True)

    def block(t):
        a = t.sin()
        b = save_region(torch.exp, a) * save_region(torch.sin, a)
        a.mul_(2)
        return b + a

    out = engine.checkpoint(block, x, early_stop=False)
    with pytest.raises(CheckpointError, match="changed in place"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        block(x).sum().backward()


CHANGES = {
    "another order": (lambda t: (one(two(t))).cos(), "forward reached"),
    "another place": (lambda t: two(one(t).sin().asin()).cos(), "it had saved|not reached"),
    "none": (lambda t: t.exp().sin().cos().exp(), "not reached"),
}


def one(t):
    return save_region(torch.exp, t.sin())


def two(t):
    return save_region(torch.tanh, t * t)


def test_a_replay_with_one_region_more(engine):
    """Rule 30: one region more than in forward is an error where the replay comes that far."""
    way = [lambda t: two(one(t)).cos()]
    x = torch.rand(4, requires_grad=True)
    out = engine.checkpoint(lambda t: way[-1](t) + 0, x, early_stop=False)
    way.append(lambda t: one(two(one(t))).cos())
    with pytest.raises(RegionError, match="forward had reached all 2 of its regions"):
        out.sum().backward()


@pytest.mark.only("hooks", because="the other engine knows no place among saved tensors")
@pytest.mark.parametrize(("other", "message"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_replay_that_goes_another_way(engine, other, message, early_stop):
    """Rule 30: another order, number or place of regions is an error, and gives backward nothing."""
    way = [lambda t: two(one(t)).cos()]
    x = torch.rand(4, requires_grad=True)
    out = engine.checkpoint(lambda t: way[-1](t) + 0, x, early_stop=early_stop)
    way.append(other)
    with pytest.raises(CheckpointError, match=message):
        out.sum().backward()
    assert x.grad is None


def test_a_region_that_forward_did_not_reach(engine):
    """Rule 30: a region in the replay alone is an error."""
    way = [torch.exp]
    x = torch.rand(4, requires_grad=True)
    out = engine.checkpoint(lambda t: way[-1](t.sin()).cos(), x)
    way.append(lambda t: save_region(torch.exp, t))
    with pytest.raises(RegionError, match="forward reached none"):
        out.sum().backward()


def test_an_input_that_looks_otherwise(engine):
    """Rule 30: an input of another shape is an error that names the argument and both shapes."""
    cut = [4]
    x = torch.rand(4, requires_grad=True)
    out = engine.checkpoint(lambda t: save_region(lambda *, size: size.exp(), size=t.sin()[: cut[0]]).cos(), x)
    cut[0] = 3
    with pytest.raises(RegionError, match=r"size of SAVE region .* is \(3,\) float32 cpu.* and was \(4,\)"):
        out.sum().backward()


def test_an_error_inside(engine, counted, same):
    """Rule 30: it comes out of the call, which leaves nothing behind; the next call is right."""
    fail = [True]

    def body(t):
        if fail[0]:
            raise KeyError("on purpose")
        return t.exp()

    x = torch.randn(4, requires_grad=True)
    block = lambda t: save_region(body, t.sin()).cos()  # noqa: E731
    with recompute_handle_collector_ctx() as handles, pytest.raises(KeyError):
        engine.checkpoint(block, x)
    assert handles == []
    fail[0] = False
    same(grads_of(engine.checkpoint(block, x), x), grads_of(x.sin().exp().cos(), x))


def test_an_error_inside_that_is_caught(engine):
    """Rule 30: a function that goes on after a region raised is refused in forward."""

    def fail(t):
        raise KeyError("on purpose")

    def block(t):
        try:
            save_region(fail, t.sin())
        except KeyError:
            t = t.exp()
        return t.cos()

    with pytest.raises(RegionError, match="raised KeyError and the function went on"):
        engine.checkpoint(block, torch.randn(4, requires_grad=True))


@pytest.mark.only("hooks", because="forward of the other engine has no graph")
def test_a_gradient_through_a_region_inside_the_function(engine):
    """Rule 30: a replay has no way through a region, and says so."""

    def block(t):
        a = t.sin()
        (grad,) = torch.autograd.grad(save_region(torch.exp, a).sum(), a, create_graph=True)
        return grad.cos()

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(RegionError, match="computes a gradient through SAVE region"):
        engine.checkpoint(block, x).sum().backward()


def test_a_region_under_a_transform(engine):
    """Rule 30: refused in forward."""
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(RegionError, match=r"torch\.func transform"):
        engine.checkpoint(lambda t: torch.vmap(lambda row: save_region(torch.sin, row))(t.exp()), x)


@pytest.mark.only("hooks", because="the other engine takes no contexts")
def test_a_region_under_torchs_selective_contexts(engine):
    """Rule 30: torch's contexts count operators in both runs, so they are refused."""
    contexts = lambda: torch_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)  # noqa: E731
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(RegionError, match="torch's own selective contexts"):
        engine.checkpoint(lambda t: save_region(torch.sin, t.exp()).cos(), x, context_fn=contexts)


def test_tensors_hidden_in_an_object(engine):
    """Rule 30: an output that cannot be taken apart is refused in forward."""

    class Result:
        def __init__(self, value):
            self.value = value

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(RegionError, match="returns a Result"):
        engine.checkpoint(lambda t: save_region(Result, t.exp()).value.cos(), x)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_bad_arguments(value):
    """Rule 19: a bad flag or function is named."""
    with pytest.raises(ValueError, match="save_output must be True or False"):
        checkpoint_exclude_wrapper(torch.sin, save_output=value)
    with pytest.raises(ValueError, match="module_or_fn must be a module or a function"):
        checkpoint_exclude_wrapper(value)
    with pytest.raises(ValueError, match="function must be"):
        save_region(value)


# Modules.


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return self.second(self.first(x).tanh()).sin()


@pytest.mark.only("hooks", because="the other engine runs whole backwards")
def test_a_module_as_a_region(engine, same):
    """Rule 28: a region is the whole call of a module: its hooks run once; names and copies are the module's."""
    plain = Model()
    mine = copy.deepcopy(plain)
    names = list(mine.state_dict())
    assert checkpoint_exclude_wrapper(mine.second) is mine.second
    for model in (mine, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert list(model.state_dict()) == names
        assert isinstance(model.second, nn.Sequential)
        runs, replays = [], []
        model.second[0].register_forward_pre_hook(lambda *_, runs=runs: runs.append("inner"))
        model.second.register_forward_hook(lambda *_, runs=runs: runs.append("outer"))
        model.first.register_forward_hook(lambda *_, replays=replays: replays.append(is_recomputing()))
        x = torch.randn(2, 4, requires_grad=True)
        got = torch.autograd.grad(engine.checkpoint(model, x).sum(), [x, *model.parameters()])
        same(got, torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()]))
        assert runs == ["inner", "outer"]
        assert replays == [False, True]
        part = model.second[:1]  # made by the class: no region
        assert part(torch.ones(1, 4)).shape == (1, 4)


def test_a_module_is_wrapped_once():
    """Rule 19: as a region or as a checkpoint, not both."""
    with pytest.raises(ValueError, match="is wrapped already"):
        checkpoint_exclude_wrapper(checkpoint_exclude_wrapper(nn.ReLU()))


@pytest.mark.only("hooks", because="the other engine runs whole backwards")
def test_batch_norm_in_a_region(engine, same):
    """Rule 28: statistics move once."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    mine = copy.deepcopy(plain)
    checkpoint_exclude_wrapper(mine[1])
    x = torch.randn(8, 4, requires_grad=True)
    got = torch.autograd.grad(engine.checkpoint(mine, x).sin().sum(), [x, *mine.parameters()])
    same(got, torch.autograd.grad(plain(x).sin().sum(), [x, *plain.parameters()]))
    same(list(mine.buffers()), list(plain.buffers()))


def test_while_torch_traces(engine):
    """Rule 22: inside torch.compile a region is a plain call."""
    x = torch.randn(8, requires_grad=True)
    compiled = torch.compile(
        lambda t: engine.checkpoint(lambda u: save_region(torch.sin, u.exp()).cos(), t),
        backend="aot_eager",
        fullgraph=True,
    )
    got = grads_of(compiled(x), x)
    torch.testing.assert_close(got[0], grads_of(x.exp().sin().cos(), x)[0])


def test_a_captured_tensor_that_changes_is_no_input_to_bring_back(engine):
    """Rule 30: what a region is given from outside the call is refused if it changed, as where an operator reads it."""
    x = torch.randn(4, requires_grad=True)
    mask = torch.ones(4)
    out = engine.checkpoint(lambda t: save_region(torch.mul, t.sin(), mask).cos(), x)
    mask.zero_()
    with pytest.raises(CheckpointError, match="mask"):
        out.sum().backward()
    assert x.grad is None


class Counting(nn.Module):
    """A region that moves buffers, in place or anew, and code behind it that reads them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("anew", torch.ones(()))

    def move(self, t):
        self.scale.mul_(3)
        self.anew = self.anew + 1
        return t.exp()

    def forward(self, t):
        t = t.sin() * self.scale.clone()
        t = save_region(self.move, t)
        return (t * self.scale.clone() * self.anew).cos()


def test_buffers_that_a_region_moves(same_grads):
    """Rule 28: behind a region the replay reads the buffers that forward read there, and leaves them as they are."""

    def program(call):
        model = Counting()
        (x,) = leaves((4,))
        outs = [call(model, x) for _ in range(3)]
        return [grads_of(out, x) for out in outs], list(model.buffers())

    same_grads(program)


# Found by looking for trouble: each was silently wrong, refused without need, or left something behind.


def flattened(t):
    """A view made without gradient: it says that it needs one, and takes none."""
    with torch.no_grad():
        return t.view(-1, 4)


def test_views_made_without_gradient(same_grads):
    """Rule 28: what a region returns of its input under no_grad stays without gradient."""

    def program(call):
        x, w = leaves((4, 4), (4, 4))
        gate = nn.Linear(4, 4)

        @torch.no_grad()
        def route(u):
            flat = u.view(-1, 4)
            return flat, gate(flat).softmax(-1), u[1:], u.exp().t()

        def block(t):
            h = t.sin()
            flat, p, part, other = save_region(route, h)
            same = save_region(flattened, h)
            return ((flat * p) @ w).sin() + (other @ w) * (same @ w).cos() + (part @ w).sum() + t * t

        return grads_of(call(block, x), x, w)

    same_grads(program)
    same_grads(program, early_stop=False)


@pytest.mark.parametrize("way", [torch.Tensor.t, flattened], ids=["of its own", "of its input"])
def test_a_view_without_gradient_holds_nothing(engine, track, gc_off, way):
    """Rule 29: such a view is no leaf, and keeps no graph."""

    def body(t):
        with torch.no_grad():
            return way(track(t.exp() * 2))

    x = torch.randn(4, 4, requires_grad=True)
    out = engine.checkpoint(lambda t: save_region(body, t.sin()).sin() * t.cos(), x)
    grads_of(out, x)
    del out
    assert track.alive == 0


@pytest.mark.only("hooks", because="forward of the other engine has no graph")
def test_gradients_made_under_no_grad(same_grads):
    """Rule 28: a region may record a graph where its caller records none."""

    @torch.enable_grad()
    def body(t):
        return t.exp() * 2

    def program(call):
        (x,) = leaves((4, 4))

        def block(t):
            t = save_region(torch.exp, t.sin())
            with torch.no_grad():
                y = save_region(body, t)
                z, index = save_region(lambda a: (a, a.argmax()), y)
            return y.sin() * t * z.cos() + index

        return grads_of(call(block, x), x)

    same_grads(program, early_stop=False)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_a_policy_sees_nothing_of_regions_in_checkpoints_in_regions(same_grads):
    """Rule 28: whatever is inside a region is the region's."""

    def program(call):
        x, w, v = leaves((4, 4), (4, 4), (4, 4))

        def body(t):
            return call(lambda u: save_region(torch.sin, u), t) @ w

        return grads_of(call(lambda t: (save_region(body, t.tanh()) @ v).sin(), x), x, w, v)

    same_grads(program, policy_fn=lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default)


@pytest.mark.only("hooks", because="the other engine takes no policy")
def test_a_policy_sees_nothing_of_hooks_that_compute(same_grads):
    """Rule 28: operators that the user's hooks run for a region are the region's."""

    def program(call):
        x, w = leaves((4,), (4,))
        with saved_tensors_hooks(lambda t: t * 1, lambda t: t * 1):
            out = call(lambda t: (save_region(torch.exp, t.sin()) * w).sin(), x)
        return grads_of(out, x, w)

    same_grads(program, policy_fn=lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mul.Tensor)


MOVES = {
    "a captured tensor": lambda h: save_region(lambda: h.mul_(2)),
    "the grad mode": lambda h: save_region(lambda: torch.set_grad_enabled(mode=False)),
}


@pytest.mark.only("hooks", because="forward of the other engine has no grad mode to set")
@pytest.mark.parametrize("name", MOVES)
def test_what_a_region_writes_beside_its_arguments(engine, name):
    """Rule 30: a captured tensor, or the grad mode, is refused in forward."""

    def block(t):
        h = t.sin() + 1
        MOVES[name](h)
        return h.exp().sin()

    with torch.enable_grad(), pytest.raises(RegionError, match="wrote into"):
        engine.checkpoint(block, torch.randn(4, requires_grad=True))
    assert torch.is_grad_enabled()


def test_a_variable_that_a_region_sets(engine):
    """Rule 30: refused in forward, by name."""

    def block(t):
        factor = 1

        def body(a):
            nonlocal factor
            factor = 3
            return a * 2

        return save_region(body, t.sin()).sin() * factor

    with pytest.raises(RegionError, match="wrote into factor"):
        engine.checkpoint(block, torch.randn(4, requires_grad=True))


def test_modes_that_a_region_sets(same_grads):
    """Rule 28: a module that the region switches is as switched behind it."""

    def program(call):
        drop = nn.Dropout(0.5)
        (x,) = leaves((16,))

        def block(t):
            drop.train()
            return drop(save_region(lambda a: drop.eval()(a) * 2, t.sin())).sin()

        return grads_of(call(block, x), x), drop.training

    same_grads(program)


class Statistics(nn.Module):
    """Running statistics that a kernel writes without telling, and a buffer that comes into being in the region."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.register_buffer("late", None)

    def body(self, t):
        self.late = torch.full((4,), 2.0)
        return F.batch_norm(t, self.mean, self.var, training=True)

    def forward(self, t):
        t = save_region(self.body, t.sin())
        return (t * self.mean.clone() * self.late).sin()


def test_buffers_that_kernels_write_or_that_come_into_being(same_grads):
    """Rule 28: behind a region they are as forward had them."""

    def program(call):
        model = Statistics()
        x = torch.randn(8, 4, dtype=torch.float32, requires_grad=True)
        outs = [call(model, x * factor) for factor in (1, 2)]
        return [grads_of(out, x) for out in outs]

    same_grads(program)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


OBJECTS = {
    "an iterator": lambda a: iter([a.exp()]),
    "a zip": lambda a: zip([a.exp()], [1], strict=True),
    "a set": lambda a: {a.exp()},
    "slots": lambda a: Slotted(a.exp()),
    "a list in an object": lambda a: Slotted([a.exp()]),
    "a closure": lambda a: (lambda y: lambda: y)(a.exp()),  # noqa: PLC3002
    "a dict of its own": lambda a: type("Table", (dict,), {})(value=a.exp()),
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_objects_that_hide_tensors(engine, track, gc_off, make):
    """Rules 12 and 30: refused in forward, and nothing is left."""
    x = torch.randn(4, requires_grad=True)

    def block(t):
        save_region(lambda a: make(track(a.exp() * 2)), t.sin())
        return t.cos()

    with pytest.raises(RegionError, match="cannot be taken apart") as caught:
        engine.checkpoint(block, x)
    del caught
    assert track.alive == 0


def test_outputs_that_share_memory_under_hooks_that_copy(engine):
    """Rule 30: one of them is written: refused, since copies of them would share nothing."""

    def body(u):
        doubled = u * 2.0
        return doubled, doubled.view(-1)

    def block(t):
        a, b = save_region(body, t.sin())
        b.mul_(3)
        return a.exp()

    with saved_tensors_hooks(torch.clone, torch.clone), pytest.raises(RegionError, match="changed in place"):
        engine.checkpoint(block, torch.randn(4, requires_grad=True))


@pytest.mark.only("hooks", because="the other engine runs whole backwards")
def test_an_output_that_hooks_keep_and_the_replay_overwrites(engine, same):
    """Rule 30: the first backward is right, and a second one is refused rather than wrong."""
    x = torch.randn(4, requires_grad=True)
    with saved_tensors_hooks(torch.clone, lambda kept: kept):
        out = engine.checkpoint(lambda t: save_region(lambda u: u * 2.0, t.sin()).mul_(3).exp().sin(), x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    same(first, torch.autograd.grad((x.sin() * 6).exp().sin().sum(), x))
    with pytest.raises(RegionError, match="changed in place"):
        torch.autograd.grad(out, x)


def test_a_leaf_that_a_region_makes_and_that_changes(engine):
    """Rule 30: refused, as plain autograd refuses it."""
    made = []
    x = torch.randn(4, requires_grad=True)

    def body(_):
        made.append(torch.ones(4, requires_grad=True))
        return made[0]

    out = engine.checkpoint(lambda t: (save_region(body, t) * t.sin()).exp(), x)
    with torch.no_grad():
        made[0].zero_()
    with pytest.raises(CheckpointError, match="changed in place"):
        out.sum().backward()


@pytest.mark.only("hooks", because="forward of the other engine has no graph")
def test_a_detached_twin_of_an_input(engine, same):
    """Rule 29: an input that is passed through is that input, not another one with its memory."""
    x = torch.randn(4, requires_grad=True)

    def block(t):
        h = t.sin()
        passed = save_region(lambda _, u: u, h.detach(), h)
        (grad,) = torch.autograd.grad(passed.square().sum() + t.square().sum(), t, retain_graph=True)
        return t * grad.detach() * h

    same(grads_of(engine.checkpoint(block, x * 1.0), x), grads_of(block(x * 1.0), x))


@pytest.mark.only("hooks", because="the other engine runs whole backwards")
def test_the_caller_writes_into_the_output_of_the_last_region(engine, same):
    """Rule 30: no replay needs it, so nothing is refused."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    checkpoint_exclude_wrapper(model[1])
    x = torch.randn(2, 4, requires_grad=True)
    found = []
    for out, module in ((engine.checkpoint(model, x), model), (plain(x), plain)):
        out.add_(x)
        found.append(torch.autograd.grad(out.sum(), [x, *module.parameters()]))
    same(*found)


def test_strides_that_hooks_do_not_keep(same_grads):
    """Rule 29: an input is found as a whole, whatever its strides."""

    def program(call):
        (x,) = leaves((4, 6))
        with saved_tensors_hooks(torch.clone, lambda kept: kept):
            out = call(lambda t: save_region(torch.exp, t).cos(), x.sin()[:, ::2])
        return grads_of(out, x)

    same_grads(program)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_from_a_region_to_one_in_an_inner_checkpoint(engine, same):
    """Rule 29: an output that is not kept may go into a region of a checkpoint inside."""
    first = checkpoint_exclude_wrapper(torch.exp, save_output=False)
    x = torch.randn(4, 4, requires_grad=True)

    def inner(a):
        return save_region(lambda u: u * u.sin(), a).cos()

    got = grads_of(engine.checkpoint(lambda t: engine.checkpoint(inner, first(t.sin())), x), x)
    a = x.sin().exp()
    same(got, grads_of((a * a.sin()).cos(), x))


def test_a_placeholder_is_a_pattern(engine, same):
    """Rule 29: new tensors after its shape read no values."""
    first = checkpoint_exclude_wrapper(torch.exp, save_output=False)
    x = torch.randn(4, requires_grad=True)

    def block(t):
        a = first(t.sin())
        return save_region(torch.mul, a, torch.ones_like(a) + a.new_full((4,), 2.0)).cos()

    same(grads_of(engine.checkpoint(block, x), x), grads_of((x.sin().exp() * 3).cos(), x))


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_a_checkpoint_inside_a_region_belongs_to_the_session(engine, counted, same):
    """Rules 15 and 28: with the outer call prefired, the inner one is replayed once for dx and dw."""
    inner = counted(lambda t, w: (t * w).exp().sin())
    w, x = leaves((4,), (4,))
    with recompute_handle_collector_ctx() as handles:
        out = engine.checkpoint(lambda t: save_region(lambda u: engine.checkpoint(inner, u, w), t.sin()).cos(), x).sum()
    recompute_handle(handles[0], "s")
    with recompute_session_ctx("s", retain_on_unpack=True):
        dx = torch.autograd.grad(out, x, retain_graph=True)
    with recompute_session_ctx("s"):
        dw = torch.autograd.grad(out, w)
    clear_recompute_session("s")
    assert inner.runs == 2
    same([*dx, *dw], list(torch.autograd.grad(inner.function(x.sin(), w).cos().sum(), [x, w])))
