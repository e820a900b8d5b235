"""Checkpoints inside checkpoints: regrow's in regrow's, and each way round with torch's own."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_a_nested_call_runs_once_more_per_level(engine, counted):
    """Rule 15: outer twice; inner in forward, in outer's replay, and in its own."""
    inner = counted(lambda t: t.exp().tanh())
    outer = counted(lambda t: engine.checkpoint(inner, t.sin()).cos())
    engine.checkpoint(outer, torch.randn(3, requires_grad=True)).sum().backward()
    assert (outer.runs, inner.runs) == (2, 3)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_an_outer_call_around_two_inner_ones_replays_once(engine, counted):
    """Rule 15: both inner calls take their inputs from one replay of the outer."""
    first, second = counted(lambda t: t.exp().tanh()), counted(lambda t: t.sin().exp())
    outer = counted(lambda t: engine.checkpoint(second, engine.checkpoint(first, t.cos()) * 2).sigmoid())
    engine.checkpoint(outer, torch.randn(3, requires_grad=True)).sum().backward()
    assert outer.runs == 2
    assert max(first.runs, second.runs) <= 3


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
@pytest.mark.parametrize("depth", [2, 3, 5])
@pytest.mark.parametrize("retain", [False, True])
def test_any_depth_and_a_second_backward(same_grads, depth, retain):
    """Rule 15: gradients are those of the plain call, however deep, however often."""

    def program(call):
        w = torch.randn(3, 3, requires_grad=True)

        def level(n):
            def run(t):
                h = torch.dropout(t @ w, 0.3, True).sin()
                return (call(level(n - 1), h) if n else h).tanh() * t

            return run

        x = torch.randn(2, 3, requires_grad=True)
        loss = call(level(depth), x).sum()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
        return x.grad, w.grad

    same_grads(program)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_nested_calls_with_containers_captures_and_unused_inputs(same_grads):
    """Rule 15: whatever tensors an inner call takes are held by the outer one, and come back from its replay."""

    def program(call):
        x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        index = torch.tensor([2, 0, 1])

        def inner(parts, *, extra, unused):
            return (parts["a"][parts["i"]] * extra).exp() * w

        def outer(t):
            h = t.sin()
            return call(inner, {"a": h, "i": index}, extra=h.cos(), unused=[t, None]).tanh()

        call(outer, x).sum().backward()
        return x.grad, w.grad

    same_grads(program)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_an_inner_call_whose_input_the_outer_one_overwrites_is_refused(engine):
    """Rule 4: outer's replay cannot give inner the input it had, so it says so before anything accumulates."""
    x = torch.randn(3, requires_grad=True)

    def outer(t):
        h = t * 1
        kept = engine.checkpoint(lambda u: (u * 2).exp(), h)
        h.mul_(3)
        return kept.sin() + h.exp()

    with pytest.raises(RuntimeError, match="changed in place"):
        engine.checkpoint(outer, x).sum().backward()
    assert x.grad is None


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_a_call_in_forward_of_another_that_differentiates_it(same_grads):
    """Rule 15: the outer function asks for gradients through the inner call, of second order."""

    def program(call):
        x = torch.randn(3, requires_grad=True)

        def outer(t):
            u = call(lambda s: s.exp().sin(), t)
            (grad,) = torch.autograd.grad(u.sum(), t, create_graph=True)
            return grad.tanh() * u

        call(outer, x).sum().backward()
        return x.grad

    same_grads(program)


def torchs(use_reentrant):
    return lambda function, *args: torch_checkpoint(function, *args, use_reentrant=use_reentrant)


@pytest.mark.only("hooks", because="torch warns inside a forward without a graph")
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
def test_torchs_checkpoint_inside(same_grads, use_reentrant):
    """Rule 15: code that checkpoints its parts with torch may be checkpointed as a whole."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        call(lambda t: torchs(use_reentrant)(lambda u: u.exp().tanh(), t.sin()).cos(), x).sum().backward()
        return x.grad

    same_grads(program)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
def test_torchs_checkpoint_around(same_grads, use_reentrant):
    """Rule 15: and the other way round."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        torchs(use_reentrant)(lambda t: call(lambda u: u.exp().tanh(), t.sin()).cos(), x).sum().backward()
        return x.grad

    same_grads(program)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_an_inner_call_that_fails_in_the_replay_fails_the_backward_and_leaves_nothing(engine, track, gc_off):
    """Rule 11: the exception passes through both replays; the graph works later."""
    fail = []

    def inner(t):
        h = track(t.exp())
        if fail:
            raise KeyError("inner")
        return track(h.tanh())

    def outer(t):
        return track(engine.checkpoint(inner, track(t.sin()))).cos()

    x = torch.randn(3, requires_grad=True)
    out = engine.checkpoint(outer, x).sum()
    fail.append(True)
    with pytest.raises(KeyError, match="inner"):
        out.backward()
    assert (track.alive, x.grad) == (0, None)
    fail.clear()
    out.backward()
    want = x.detach().clone().requires_grad_()
    want.sin().exp().tanh().cos().sum().backward()
    assert torch.equal(x.grad, want.grad)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_nested_calls_inside_each_others_contexts(same_grads):
    """Rule 15: an inner call keeps the autocast state it was made in, though outer's replay starts elsewhere."""

    def program(call):
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

        def outer(t):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = call(lambda u: (u @ w).tanh(), t)
            return call(lambda u: (u @ w).float().sin(), h.float())

        call(outer, x).sum().backward()
        return x.grad, w.grad

    same_grads(program)
