"""Reported situations: random numbers, autocast and modes that a replay must see again."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@pytest.mark.case("B1")
def test_the_dropout_mask_comes_back_and_the_stream_of_the_caller_does_not_move(same_grads):
    """Rule 3: a replay draws forward's numbers, and later draws are as if it had not happened."""

    def noisy(parts):
        return torch.dropout(parts["x"], 0.5, True).sin() * torch.rand_like(parts["x"]) + torch.randn(8)

    def program(call):
        x = torch.ones(8, requires_grad=True)
        between = torch.rand(2)
        out = call(noisy, {"x": x})
        torch.rand(17)  # the stream moves on between forward and backward
        out.sum().backward()
        return x.grad, out.detach(), between, torch.rand(4)

    same_grads(program)


@pytest.mark.case("B2")
@pytest.mark.parametrize("outside", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inside", [None, torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_that_of_forward_whatever_surrounds_backward(same_grads, inside, outside):
    """Rule 3: the replay computes in forward's type."""
    seen = []

    def block(x, w):
        y = x @ w
        seen.append(y.dtype)
        return y.float().tanh()

    def autocast(dtype):
        return torch.autocast("cpu", enabled=dtype is not None, dtype=dtype or torch.bfloat16)

    def program(call):
        x = (torch.arange(16.0).view(4, 4) / 7).requires_grad_()
        w = (torch.eye(4) * 1.37).requires_grad_()
        with autocast(inside):
            out = call(block, x, w)
        with autocast(outside):
            out.sum().backward()
        return x.grad, w.grad

    same_grads(program)
    assert seen == [inside or torch.float32] * 3  # plain, forward, replay


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.matmul:
            args = (args[0] * 2, *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.case("B3")
def test_a_function_mode_around_forward_is_there_in_the_replay(engine):
    """Rule 3: a mode that changes an operation changes it in the replay too."""
    other = torch.randn(4, 4)

    def region(t):
        return torch.matmul(t, other).sin()

    x = torch.randn(4, 4, requires_grad=True)
    with Doubling():
        region(x).sum().backward()
    want, x.grad = x.grad, None
    with Doubling():
        out = engine.checkpoint(region, x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, want)


@pytest.mark.only("hooks", because="forward of the other engine records no graph")
@pytest.mark.case("B4")
def test_backward_on_another_thread_replays_as_forward_ran(same_grads, on_thread):
    """Rule 3: autocast, random numbers and grad mode of forward hold on a bare thread, and only in the replay."""
    seen = []

    def program(call):
        layer = nn.Linear(6, 6)
        x = torch.randn(3, 6, requires_grad=True)

        def region(t):
            y = torch.dropout(layer(t), 0.5, True)
            seen.append((y.dtype, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return y.float().square()

        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(region, x).sum()
        on_thread(loss.backward)
        return x.grad, layer.weight.grad

    same_grads(program)
    assert seen == [(torch.bfloat16, True, True)] * 3  # plain, forward, replay
    assert not torch.is_autocast_enabled("cpu")
