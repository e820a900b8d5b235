"""Reported situations: exceptions, replays that differ, and stopping early."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from regrow import ReplayMismatchError


@pytest.mark.case("G1")
def test_an_exception_in_forward_leaves_nothing_behind(engine, same):
    """Rule 11: the stack of hooks, the random stream and the next step are as if the call had not been made."""
    runs = []

    def region(t, fail):
        runs.append(fail)
        h = torch.dropout(t.exp(), 0.5, True)
        if fail:
            raise KeyError("bad batch")
        return h.sin()

    x = torch.ones(16, requires_grad=True)
    torch.manual_seed(6)
    with pytest.raises(KeyError, match="bad batch"):
        engine.checkpoint(region, x, True)
    stream = torch.get_rng_state()
    torch.manual_seed(6)
    torch.dropout(torch.ones(16), 0.5, True)
    assert torch.equal(stream, torch.get_rng_state())

    x.sin().sum().backward()  # no hook that stayed installed may see this
    assert runs == [True]
    torch.testing.assert_close(x.grad, torch.ones(16).cos())

    x.grad = None
    torch.manual_seed(7)
    engine.checkpoint(region, x, False).sum().backward()
    assert runs == [True, False, False]
    got, x.grad = x.grad, None
    torch.manual_seed(7)
    region(x, False).sum().backward()
    same(got, x.grad)


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
@pytest.mark.case("G2")
def test_a_replay_that_routes_differently_is_an_error(engine):
    """Rule 4: experts that get other rows in the replay make an error, not a gradient."""
    gains = [torch.randn(4, requires_grad=True) for _ in range(2)]
    split = [5]

    def region(x):
        cut = split[0]
        return torch.cat([(x[:cut] * gains[0]).tanh(), (x[cut:] * gains[1]).exp()])

    x = torch.randn(8, 4, requires_grad=True)
    out = engine.checkpoint(region, x)
    split[0] = 3
    stream = torch.get_rng_state()
    with pytest.raises(ReplayMismatchError, match="differ"):
        out.sum().backward()
    assert [t.grad for t in (x, *gains)] == [None, None, None]
    assert torch.equal(stream, torch.get_rng_state())

    engine.checkpoint(region, x).sum().backward()  # a fresh step, with one split
    t, a, b = (tensor.detach() for tensor in (x, *gains))
    torch.testing.assert_close(x.grad, torch.cat([(1 - (t[:3] * a).tanh() ** 2) * a, (t[3:] * b).exp() * b]))


@pytest.mark.case("G3")
def test_the_slopes_of_a_randomised_leaky_relu_are_those_that_were_applied(engine, same):
    """Rule 5: the noise is saved before the kernel writes it; a replay that stopped there would keep garbage."""
    x = torch.randn(256, requires_grad=True)

    def region(t):
        return F.rrelu(t, 0.1, 0.9, training=True)

    torch.manual_seed(12)
    out = engine.checkpoint(region, x)
    junk = [torch.full((256,), 3.0) for _ in range(64)]
    del junk  # freed memory now holds something that is no slope
    out.sum().backward()
    got, x.grad = x.grad, None

    torch.manual_seed(12)
    again = region(x)
    again.sum().backward()
    same((out, got), (again, x.grad))
    torch.testing.assert_close(x.grad * x.detach(), again.detach())


@pytest.mark.only("hooks", because="the other engine replays whenever backward comes by")
@pytest.mark.case("G4")
def test_nothing_is_replayed_where_nothing_was_saved(engine, counted):
    """Rule 2: a backward that needs no saved tensor runs nothing again."""
    region = counted(lambda t, u: ((t + u).view(-1).clone(), u.sum(0)))
    t, u = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    flat, total = engine.checkpoint(region, t, u)
    (flat * torch.arange(6.0)).sum().backward(retain_graph=True)
    total.sum().backward()
    assert region.runs == 1
    ramp = torch.arange(6.0).view(2, 3)
    assert torch.equal(t.grad, ramp)
    assert torch.equal(u.grad, ramp + 1)
