"""Reported situations: when memory is given back. Storages are watched weakly, the cyclic collector is off."""

import weakref

import pytest
import torch
from torch import nn

from regrow import checkpoint_wrapper


@pytest.mark.case("F1")
def test_activations_are_gone_after_forward_and_after_backward(engine, track, gc_off, same):
    """Rule 12: between forward and backward only what crosses the border of a call is alive."""

    def region(t):
        h = track(t.exp())
        h = track(h.tanh())
        return track(h.sigmoid())

    x = torch.randn(64, requires_grad=True)
    h = x
    for _ in range(4):
        h = engine.checkpoint(region, h)
    assert track.alive == 4  # three results handed on, and the last one
    loss = h.sum()
    del h
    loss.backward()
    assert track.alive == 0
    assert track.seen >= 12 + 8

    y = x.detach().clone().requires_grad_()
    want = y
    for _ in range(4):
        want = want.exp().tanh().sigmoid()
    want.sum().backward()
    same(x.grad, y.grad)


@pytest.mark.only("hooks", because="the other engine refuses a limited backward outside a scope")
@pytest.mark.case("F2")
def test_the_input_gradient_pass_leaves_nothing_regrown_behind(engine, track, gc_off):
    """Rule 6: what dx regrew and did not read does not stay until dw."""
    x, w = torch.randn(8, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)

    def region(t):
        weight = track(track(torch.tanh(w)).exp())  # used by dw alone
        return track(torch.tanh(t @ weight)).exp()

    loss = engine.checkpoint(region, x).sum()
    alive, seen = [track.alive], track.seen
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    alive.append(track.alive)
    assert track.seen > seen
    (dw,) = torch.autograd.grad(loss, w)
    alive.append(track.alive)
    assert alive == [0, 0, 0]
    torch.testing.assert_close((dx, dw), torch.autograd.grad(region(x).sum(), (x, w)))


@pytest.mark.case("F3")
def test_a_function_that_can_reach_its_own_output_is_freed_after_backward(engine, track, gc_off):
    """Rule 12: the function closes over a dict in which the caller keeps the result."""

    def build():
        state = {"extra": track(torch.zeros(16))}
        x = torch.randn(16, requires_grad=True)
        out = state["out"] = engine.checkpoint(lambda t: t.sin() * (1 + state["extra"]), x)
        return x, out

    x, out = build()
    out.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    track(out)
    del out
    assert track.alive == 0


@pytest.mark.only("hooks", because="a failed backward releases a call of the other engine")
@pytest.mark.case("F4")
def test_a_replay_that_fails_gives_its_memory_back(engine, track, gc_off, same):
    """Rule 11: out of memory in the middle of a replay; the graph is still held, and works later."""
    fail = []

    def region(t):
        h = track(t.exp())
        h = track(h.tanh())
        if fail:
            raise MemoryError("simulated")
        return h.sin()

    x = torch.randn(32, requires_grad=True)
    loss = engine.checkpoint(region, x).sum()
    assert track.alive == 0
    fail.append(True)
    with pytest.raises(MemoryError):
        loss.backward()
    assert (track.seen, track.alive, x.grad) == (4, 0, None)
    fail.clear()
    loss.backward()
    y = x.detach().clone().requires_grad_()
    y.exp().tanh().sin().sum().backward()
    same(x.grad, y.grad)


@pytest.mark.case("F5")
def test_a_wrapped_module_dies_with_its_last_reference(gc_off):
    """Rule 12: a wrapper points at nothing that points back."""
    model = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    layer = weakref.ref(model[0])
    weight = weakref.ref(layer().weight)
    out = model(torch.randn(2, 4, requires_grad=True))
    out.sum().backward()
    torch.testing.assert_close(layer().bias.grad, (1 - out.detach() ** 2).sum(0))
    del out, model
    assert (layer(), weight()) == (None, None)
