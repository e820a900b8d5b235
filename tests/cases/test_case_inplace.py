"""Reported situations: in-place operations, views and shared storage."""

import pytest
import torch
from torch import nn

from regrow import InputChangedError

REGIONS = {
    "relu of a whole view": lambda x, shift: (x + shift)[:].relu_(),
    "view scaled, viewed back": lambda x, shift: (x + shift).view(-1).mul_(2).view(2, 3, 4),
    "module in place": lambda x, _: nn.Sequential(nn.InstanceNorm1d(3), nn.ReLU(inplace=True))(x),
    "relu of a part": lambda x, shift: torch.relu_((x * shift).transpose(0, 1)[1:]),
}


@pytest.mark.case("D1")
@pytest.mark.parametrize("name", REGIONS)
def test_a_function_may_end_in_an_in_place_operator_on_a_view(same_grads, name):
    """Rule 1: the gradient goes on behind a result that is a view changed in place."""

    def program(call):
        x = torch.randn(2, 3, 4, requires_grad=True)
        shift = torch.tensor(0.25, requires_grad=True)
        out = call(REGIONS[name], x, shift)
        (out * torch.randn(out.shape)).sum().backward()
        return out.detach(), x.grad, shift.grad

    same_grads(program)


@pytest.mark.only("hooks", because="the other engine refuses it in forward")
@pytest.mark.case("D2")
def test_a_function_that_overwrites_its_own_input_is_refused_before_anything_accumulates(engine):
    """Rule 4: the replay would start from the overwritten values, so it does not start."""
    gain = torch.tensor([1.5, -2.0, 0.5, 3.0], requires_grad=True)

    def region(h):
        h.mul_(gain)
        return h.sin() + h

    x = torch.linspace(-1, 1, 4).requires_grad_()
    out = engine.checkpoint(region, x * 1.0)
    with pytest.raises(InputChangedError, match=r"in place since forward: argument 0 "):
        out.sum().backward()
    assert (x.grad, gain.grad) == (None, None)


@pytest.mark.case("D3")
def test_a_buffer_refilled_after_forward_is_refused_by_name(engine):
    """Rule 4: a work buffer handed over by keyword is refilled for the next layer before backward."""
    weight = torch.randn(4, 4, requires_grad=True)
    bias = torch.randn(4, requires_grad=True)
    buffer = torch.randn(3, 4)

    def layer(*, x, bias):
        return (x @ weight + bias["b"]).tanh()

    loss = engine.checkpoint(layer, x=buffer, bias={"b": bias}).sum()
    buffer.copy_(torch.randn(3, 4))
    with pytest.raises(InputChangedError) as refused:
        loss.backward()
    assert refused.value.names == ["x"]
    assert (weight.grad, bias.grad) == (None, None)
