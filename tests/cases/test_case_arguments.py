"""Reported situations: what goes into a checkpointed call, and what comes out."""

import collections
import dataclasses

import pytest
import torch
from torch import nn


@pytest.mark.case("A1")
def test_none_flags_and_nested_arguments_keep_their_places(engine, same):
    """Rule 3: arguments that are no tensors arrive in the replay where forward saw them."""
    seen = []

    def mix(x, nothing, flag, table, *, scale, rows=None, name="n"):
        seen.append((nothing, flag, name, scale, sorted(table), len(rows)))
        y = x * scale + table["bias"]["b"] if flag else x
        for row in rows:
            y = y + row.tanh()
        return y.sigmoid()

    def grads(call):
        leaves = [torch.randn(3, generator=torch.Generator().manual_seed(k)).requires_grad_() for k in range(4)]
        x, bias, *rows = leaves
        out = call(mix, x, None, True, {"bias": {"b": bias}, "zero": 0}, scale=2.5, rows=rows, name="deep")
        out.square().sum().backward()
        return [leaf.grad for leaf in leaves]

    same(grads(engine.checkpoint), grads(lambda function, *args, **kwargs: function(*args, **kwargs)))
    assert seen == [(None, True, "deep", 2.5, ["bias", "zero"], 2)] * 3


@dataclasses.dataclass
class Report:
    loss: torch.Tensor
    stats: dict
    note: str
    empty: object = None


Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.only("hooks", because="outputs of the other engine are all of one node")
@pytest.mark.case("A2")
def test_outputs_keep_their_type_and_their_place_in_the_graph(engine):
    """Rule 1: what the function returns is what the caller gets, connected where it was."""

    def run(x):
        h = x.exp()
        return Report(h.sum(), {"mean": h.mean(), "count": h.numel(), "raw": h.detach()}, "ok"), Pair(h, x > 0)

    x = torch.randn(5, requires_grad=True)
    report, pair = engine.checkpoint(run, x)
    assert type(report) is Report
    assert type(pair) is Pair
    assert (report.note, report.empty, report.stats["count"]) == ("ok", None, 5)
    tensors = (report.loss, report.stats["mean"], pair.left, report.stats["raw"], pair.right)
    assert [tensor.requires_grad for tensor in tensors] == [True, True, True, False, False]

    (report.loss + 3 * report.stats["mean"] + pair.left[0]).backward()
    want = x.detach().exp() * (1 + 3 / 5)
    want[0] += x.detach()[0].exp()
    torch.testing.assert_close(x.grad, want)


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(6, 2) * 0.3)
        self.up = nn.Parameter(torch.randn(2, 6) * 0.3)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return torch.relu(self.base(x) + x @ self.down @ self.up)


@pytest.mark.case("A3")
def test_adapters_of_a_frozen_model_train(engine, same):
    """Rule 1: parameters get their gradients although the input and most weights need none."""
    layers = nn.ModuleList(Adapted() for _ in range(3))
    x = torch.randn(4, 6)

    def grads(call):
        layers.zero_grad()
        h = x
        for layer in layers:
            h = call(layer, h)
        h.square().sum().backward()
        return [(layer.down.grad, layer.up.grad) for layer in layers]

    got = grads(engine.checkpoint)
    assert [layer.runs for layer in layers] == [2, 2, 2]
    assert all(p.grad is None for layer in layers for p in layer.base.parameters())
    same(got, grads(lambda layer, h: layer(h)))
    assert all(down.abs().sum() > 0 and up.abs().sum() > 0 for down, up in got)
