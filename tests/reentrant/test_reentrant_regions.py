"""SAVE regions in calls of the reentrant engine: the region keeps a graph of its own, and replays are bridged to it."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import regrow
from regrow import CheckpointError, PlaceholderError, checkpoint_exclude_wrapper, save_region


class Block(nn.Module):
    """Two regions, one with parameters and dropout; counters for all three."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.runs = self.inside = self.mixed = 0
        self.marked = True

    def wide(self, x):
        self.inside += 1
        return F.dropout(self.up(x).tanh(), 0.2)

    def mix(self, x, y):
        self.mixed += 1
        return (x @ y.transpose(-1, -2)).softmax(-1) @ y

    def forward(self, x):
        self.runs += 1
        call = save_region if self.marked else lambda f, *args: f(*args)
        h = call(self.wide, self.norm(x))
        h = call(self.mix, h.sin(), h)
        return x + F.dropout(self.down(h), 0.2)


def two_blocks():
    torch.manual_seed(0)
    mine = Block()
    plain = copy.deepcopy(mine)
    plain.marked = False
    return mine, plain


def inputs(requires_grad=True):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 8, generator=generator)
    return x.clone().requires_grad_(requires_grad), x.clone().requires_grad_(requires_grad)


def checkpoint(*args):
    return regrow.checkpoint(*args, use_reentrant=True)


def grads(module):
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_whole_backward(same, requires_grad):
    """Rule 28: regions once, the rest twice; gradients bit-equal, whether or not the input needs one."""
    mine, plain = two_blocks()
    x, y = inputs(requires_grad)
    outs = []
    for module, tensor, call in ((mine, x, checkpoint), (plain, y, lambda f, t: f(t))):
        torch.manual_seed(2)
        outs.append(call(module, tensor))
        outs[-1].sum().backward()
    same(outs[0], outs[1])
    same([x.grad, *grads(mine)], [y.grad, *grads(plain)])
    assert (mine.runs, mine.inside, mine.mixed) == (2, 1, 1)


def test_several_backwards(same):
    """Rule 28: with retain_graph every backward runs through the region's graph again."""
    mine, plain = two_blocks()
    x, y = inputs()
    torch.manual_seed(2)
    out = checkpoint(mine, x).sum()
    torch.manual_seed(2)
    want = plain(y).sum()
    for last in (False, True):
        out.backward(retain_graph=not last)
        want.backward(retain_graph=not last)
    same([x.grad, *grads(mine)], [y.grad, *grads(plain)])
    assert (mine.runs, mine.inside, mine.mixed) == (3, 1, 1)


@pytest.mark.parametrize("prefired", [False, True])
@pytest.mark.parametrize("form", ["scope", "session"])
def test_a_split_backward(same, form, prefired):
    """Rules 9 and 28: dx leaves parameters alone, dw gives them theirs, and one replay serves both."""
    mine, plain = two_blocks()
    x, y = inputs()
    torch.manual_seed(2)
    plain(y).sum().backward()
    torch.manual_seed(2)
    parameters = list(mine.parameters())
    if form == "scope":
        with regrow.reentrant_checkpoint_scope(parameters) as (handles):
            loss = checkpoint(mine, x).sum()
        handle = handles[0]
        if prefired:
            handle.recompute()
        handle.set_phase("dx")
        (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
        untouched = grads(mine)
        handle.set_phase("dw")
        torch.autograd.grad(loss, [handle.backward_trigger])
    else:
        with regrow.recompute_session_ctx("s", retain_on_unpack=True):
            with regrow.recompute_handle_collector_ctx() as handles:
                loss = checkpoint(mine, x).sum()
            if prefired:
                regrow.recompute_handle(handles[0], "s")
            (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
            untouched = grads(mine)
        with regrow.recompute_session_ctx("s"):
            torch.autograd.grad(loss, [handles[0].backward_trigger])
        regrow.clear_recompute_session("s")
    assert untouched == [None] * len(parameters)
    assert (mine.runs, mine.inside, mine.mixed) == (2, 1, 1)
    same([dx, *grads(mine)], [y.grad, *grads(plain)])


def test_hooks_of_the_regions_parameters_fire_once(same):
    """Rule 28: in a whole backward, and in dw alone of a split one."""
    seen = []
    for split in (False, True):
        mine, _ = two_blocks()
        x, _ = inputs()
        mine.up.weight.register_hook(lambda grad: seen.append("hook"))
        mine.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
        if not split:
            checkpoint(mine, x).sum().backward()
        else:
            with regrow.reentrant_checkpoint_scope(mine.parameters()) as handles:
                loss = checkpoint(mine, x).sum()
            handles[0].set_phase("dx")
            torch.autograd.grad(loss, x, retain_graph=True)
            assert seen == []
            handles[0].set_phase("dw")
            torch.autograd.grad(loss, [handles[0].backward_trigger])
        assert seen == ["hook", "accumulated"]
        seen.clear()


def test_a_parameter_in_and_outside_a_region():
    """Rule 28: it gets both contributions, added in another order than in plain autograd."""
    w = torch.randn(8, 8, requires_grad=True)
    x, y = inputs()
    block = lambda t, call: (call(torch.matmul, t.sin(), w) @ w).tanh() @ w  # noqa: E731
    checkpoint(block, x, save_region).sum().backward()
    mine, w.grad = w.grad, None
    block(y, lambda f, *args: f(*args)).sum().backward()
    torch.testing.assert_close((x.grad, mine), (y.grad, w.grad))


def test_from_region_to_region(same):
    """Rule 29: gradients go through an output that is not kept."""
    first = checkpoint_exclude_wrapper(lambda t: t.exp() + 1, save_output=False)
    second = checkpoint_exclude_wrapper(lambda a, b: a.sum(-1, keepdim=True).sin() * b)
    x, y = inputs()
    checkpoint(lambda t: second(first(t.sin()).transpose(0, 1).transpose(0, 1), t.tanh()).cos(), x).sum().backward()
    a = y.sin().exp() + 1
    (a.sum(-1, keepdim=True).sin() * y.tanh()).cos().sum().backward()
    same(x.grad, y.grad)


def test_an_output_that_is_not_kept_is_read():
    """Rule 30: an error that names the region, before anything accumulates."""
    first = checkpoint_exclude_wrapper(torch.exp, save_output=False)
    x, _ = inputs()
    out = checkpoint(lambda t: (first(t.sin()) * 2).cos(), x)
    with pytest.raises(PlaceholderError, match="save_output=False"):
        out.sum().backward()
    assert x.grad is None


def test_a_mask_among_the_inputs_needs_no_gradient(same):
    """Rule 28: what is given to the call without a gradient is given to the region without one."""
    seen = []

    def attend(q, mask):
        seen.append((q.requires_grad, mask.requires_grad))
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    x, y = inputs()
    checkpoint(lambda t, m: save_region(attend, t.sin(), m[None]).cos(), x, mask).sum().backward()
    F.scaled_dot_product_attention(a := y.sin(), a, a, attn_mask=mask[None]).cos().sum().backward()
    same(x.grad, y.grad)
    assert seen == [(True, False)]


def test_the_border_pins_no_input(track, gc_off):
    """Rule 29: between forward and backward the region holds its output and no input; afterwards nothing is held."""
    given, made = type(track)(), type(track)()
    w = torch.randn(8, 8, requires_grad=True)
    for fate in ("backward", "dropped", "dx only"):
        x, _ = inputs()
        with regrow.recompute_session_ctx("s", retain_on_unpack=True):
            out = checkpoint(lambda t: save_region(lambda a: made(a @ w), given(t.sin())).exp(), x)
            assert (given.alive, made.alive) == (0, 1)
            if fate == "backward":
                out.sum().backward()
            elif fate == "dx only":
                torch.autograd.grad(out.sum(), x, retain_graph=True)
                assert given.alive == 1
        regrow.clear_recompute_session("s")
        assert given.alive == 0
        del out
        assert made.alive == 0


def test_a_limited_backward_with_parameters_in_a_region():
    """Rule 28: parameters of a region are captured parameters; a region without any is in nobody's way."""
    mine, _ = two_blocks()
    x, y = inputs()
    with pytest.raises(CheckpointError, match="reentrant_checkpoint_scope"):
        torch.autograd.grad(checkpoint(mine, x).sum(), x)
    (got,) = torch.autograd.grad(checkpoint(lambda t: save_region(torch.exp, t.sin()).cos(), x).sum(), x)
    (want,) = torch.autograd.grad(y.sin().exp().cos().sum(), y)
    assert torch.equal(got, want)


def test_only_a_region_has_parameters(same):
    """Rule 28: the output needs a gradient although forward recorded nothing and no input needs one."""
    layer = nn.Linear(8, 8)
    hidden = [layer]  # where nobody looks
    x, _ = inputs(requires_grad=False)
    checkpoint(lambda t: save_region(lambda a: hidden[0](a) * 1, t.sin()).cos(), x).sum().backward()
    got = grads(layer)
    layer.zero_grad()
    (layer(x.sin()) * 1).cos().sum().backward()
    same(got, grads(layer))


def test_two_backwards_at_once():
    """Rule 28: what arrives at the gate is each backward's own."""
    layer, rounds = nn.Linear(8, 8), 20
    x, _ = inputs()
    out = checkpoint(lambda t: save_region(layer, t.sin()).tanh(), x)
    grads_in = [torch.full_like(out, factor) for factor in (1.0, 100.0)]
    (one,) = torch.autograd.grad(layer(x.sin()).tanh(), x, grads_in[0])
    start = threading.Barrier(2)

    def work(grad):
        start.wait()
        for _ in range(rounds):
            out.backward(grad, retain_graph=True)

    threads = [threading.Thread(target=work, args=(grad,)) for grad in grads_in]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    torch.testing.assert_close(x.grad, one * 101 * rounds, rtol=1e-4, atol=1e-4)
