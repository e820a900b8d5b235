"""A function can tell whether it is run again."""

import pytest
import torch

from regrow import clear_recompute_session, is_recomputing, recompute_handle, recompute_handle_collector_ctx


def test_only_a_replay_recomputes(engine):
    """Rule 18: not forward, not a plain call, not backward itself, not what comes after."""
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(("backward", is_recomputing()))
            return grad

    def function(t):
        seen.append(("function", is_recomputing()))
        return Look.apply(t.sin()).exp()

    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        engine.checkpoint(function, x)
    engine.checkpoint(function, x).sum().backward()
    seen.append(("after", is_recomputing()))
    assert seen == [
        ("function", False),
        ("function", False),
        ("function", True),
        ("backward", False),
        ("after", False),
    ]


def test_on_any_thread(engine, anywhere):
    """Rule 18: the answer is that of the thread that replays."""
    seen = []
    out = engine.checkpoint(lambda t: (seen.append(is_recomputing()), t.sin())[1], torch.randn(3, requires_grad=True))
    anywhere(out.sum().backward)
    assert seen == [False, True]


def test_another_thread_meanwhile_does_not_recompute(engine, on_thread):
    """Rule 18: a replay here is none there."""
    elsewhere = []

    def function(t):
        elsewhere.append(on_thread(is_recomputing))
        return t.sin()

    engine.checkpoint(function, torch.randn(3, requires_grad=True)).sum().backward()
    assert elsewhere == [False, False]


def test_in_a_prefire(engine):
    """Rule 18: however the replay is started."""
    seen = []
    with recompute_handle_collector_ctx() as handles:
        _alive = engine.checkpoint(
            lambda t: (seen.append(is_recomputing()), t.sin())[1], torch.randn(3, requires_grad=True)
        )
    recompute_handle(handles[0], "session")
    clear_recompute_session("session")
    assert seen == [False, True]


def test_after_a_replay_that_failed(engine):
    """Rule 18: also when it ends by an error."""
    fail = []

    def function(t):
        if fail:
            raise KeyError
        return t.sin()

    out = engine.checkpoint(function, torch.randn(3, requires_grad=True)).sum()
    fail.append(True)
    with pytest.raises(KeyError):
        out.backward()
    assert not is_recomputing()


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_while_a_generator_or_hook_of_the_function_runs(engine):
    """Rule 18: what the function calls is in the replay, what backward calls is not."""
    seen = []

    def function(t):
        h = t.sin()
        h.register_hook(lambda grad: seen.append(("hook", is_recomputing())))
        seen.extend(("generator", is_recomputing()) for _ in range(1))
        return h.exp()

    engine.checkpoint(function, torch.randn(3, requires_grad=True)).sum().backward()
    assert seen == [("generator", False), ("generator", True), ("hook", False)]


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_a_gradient_inside_forward_replays_in_the_middle_of_it(engine):
    """Rule 18: the inner run is a replay, the rest of forward is not."""
    seen = []

    def function(t):
        seen.append(is_recomputing())
        h = t.sin()
        (grad,) = torch.autograd.grad(h.sum(), t, retain_graph=True)
        seen.append(is_recomputing())
        return h * grad

    engine.checkpoint(function, torch.randn(3, requires_grad=True))
    assert seen == [False, True, False]
