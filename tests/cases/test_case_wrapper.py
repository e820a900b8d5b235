"""Reported situations: a wrapper must not be seen by what walks the model."""

import pytest
import torch
from torch import nn

from regrow import checkpoint_wrapper


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.kind = "block"

    def forward(self, x, scale=1.0, *, mask=None, extras=None):
        h = self.norm(self.lin(x)) * scale
        if mask is not None:
            h = h.masked_fill(mask, 0.0)
        return h + (extras["bias"] if extras else 0)


def model():
    torch.manual_seed(31)
    return nn.ModuleDict({"stem": Block(), "body": nn.Sequential(Block(), Block())})


@pytest.mark.case("I1")
def test_every_kind_of_name_is_unchanged(same):
    """Rule 17: parameters, buffers and state are called what they were called."""
    plain, wrapped = model(), model()
    wrapped["stem"] = checkpoint_wrapper(wrapped["stem"])
    wrapped["body"][1] = checkpoint_wrapper(wrapped["body"][1])

    def names(net):
        return [list(net.state_dict())] + [
            [name for name, _ in walk]
            for part in (net, net["stem"])
            for walk in (part.named_parameters(), part.named_buffers())
        ]

    assert names(wrapped) == names(plain)


@pytest.mark.case("I2")
def test_weights_load_in_both_directions(same):
    """Rule 17: a run with recomputation reads what one without it saved, and the other way round."""
    plain, wrapped, fresh = model(), model(), model()
    wrapped["body"] = checkpoint_wrapper(wrapped["body"])
    wrapped["stem"].lin = checkpoint_wrapper(wrapped["stem"].lin)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(torch.randn_like(p))
    loaded = wrapped.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(5, 4)
    same(wrapped["body"](wrapped["stem"](x)), plain["body"](plain["stem"](x)))

    back = fresh.load_state_dict(wrapped.state_dict(), strict=True)
    assert [*loaded.missing_keys, *loaded.unexpected_keys, *back.missing_keys, *back.unexpected_keys] == []
    moving = ("norm.running", "num_batches")
    kept = {key: value for key, value in plain.state_dict().items() if not any(part in key for part in moving)}
    same({key: fresh.state_dict()[key] for key in kept}, kept)


@pytest.mark.case("I3")
def test_keywords_attributes_and_indices_reach_the_module(same):
    """Rule 17: calls with keywords, attributes and ``net[i]`` are those of the bare module."""
    plain, wrapped = model(), model()
    wrapped["stem"] = checkpoint_wrapper(wrapped["stem"])
    wrapped["body"] = checkpoint_wrapper(wrapped["body"])
    assert (wrapped["stem"].kind, wrapped["stem"].lin.in_features, wrapped["body"][0].kind) == ("block", 4, "block")
    with pytest.raises(AttributeError, match="absent"):
        _ = wrapped["stem"].absent

    def grads(net):
        x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
        bias = torch.zeros(4, requires_grad=True)
        mask = torch.eye(5, 4, dtype=torch.bool)
        net["stem"](x, 0.5, mask=mask, extras={"bias": bias}).exp().sum().backward()
        return x.grad, bias.grad, net["stem"].lin.weight.grad

    same(grads(wrapped), grads(plain))
