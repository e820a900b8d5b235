"""Limits shared with torch's checkpoint: the replay reads the world as it is then. Each is an expected failure.

A strict expected failure tells when a limit has gone.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch

limit = pytest.mark.xfail(
    strict=True, raises=(AssertionError, RuntimeError, pytest.fail.Exception), reason="as in torch"
)


def test_a_captured_tensor_that_was_changed_in_place_is_refused(engine):
    """Rule 4: plain autograd refuses; the replay sees a tensor that is no argument, with other values than forward."""
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2)
    out = engine.checkpoint(lambda t: (t * weight).sin(), x)
    weight.mul_(2)
    with pytest.raises(RuntimeError):
        out.sum().backward()


@limit
def test_random_numbers_in_a_batched_backward(same_grads):
    """Rule 1: plain backward draws nothing; the replay draws under the batching mode, which forbids it."""

    def program(call):
        x = torch.linspace(0.1, 1, 4).requires_grad_()
        out = call(lambda t: torch.dropout(t.exp(), 0.5, True).tanh(), x)
        return torch.autograd.grad(out, x, torch.eye(4), is_grads_batched=True)[0]

    same_grads(program)


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
@limit
def test_transforms_inside_the_function(same_grads):
    """Rule 1: torch.func.grad refuses to run under saved-tensor hooks, and those surround the function."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        call(lambda t: torch.func.grad(lambda u: u.sin().sum())(t) * t.exp(), x).sum().backward()
        return x.grad

    same_grads(program)


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
@limit
def test_a_context_around_the_replay_is_left_as_after_a_return(engine):
    """Rule 5: the stop passes through it as an exception, so a context without ``finally`` does not end."""
    log = []

    @contextmanager
    def careless():
        log.append("begin")
        yield
        log.append("end")

    x = torch.randn(3, requires_grad=True)
    engine.checkpoint(lambda t: t.sin().exp(), x, context_fn=lambda: (nullcontext(), careless())).sum().backward()
    assert log == ["begin", "end"]
