"""Reported situations: unusual tensors, compiled parts and surrounding hooks."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@pytest.mark.case("K1")
def test_a_jagged_tensor_built_inside_the_function(same_grads):
    """Rule 4: every construction makes a new symbolic length, which is no difference."""

    def program(call):
        values = torch.randn(6, 3, requires_grad=True)
        lengths = torch.tensor([2, 1, 3])

        def region(v):
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            jagged = torch.nested.nested_tensor_from_jagged(v.sin(), offsets)
            return (jagged.exp() * 2).tanh().values()

        call(region, values).sum().backward()
        return values.grad

    same_grads(program)


def build():
    return nn.Linear(20, 30), torch.randn(2, 20, requires_grad=True)


@pytest.mark.case("K2")
@pytest.mark.parametrize("preserve", [True, False])
def test_meta_tensors_run_and_run_again(engine, preserve):
    """Rule 1: an estimate of memory on the meta device sees forward and replay."""
    runs = []

    def region(layer, x):
        runs.append(x.device.type)
        return layer(x).tanh()

    with torch.device("meta"):
        layer, x = build()
    out = engine.checkpoint(region, layer, x, preserve_rng_state=preserve)
    assert (out.shape, out.is_meta) == ((2, 30), True)
    out.sum().backward()
    assert runs == ["meta", "meta"]
    assert (x.grad.shape, layer.weight.grad.shape, layer.weight.grad.is_meta) == ((2, 20), (30, 20), True)


@pytest.mark.case("K2")
def test_fake_tensors_run_and_run_again(engine):
    """Rule 1: the same under a fake tensor mode."""
    runs = []

    def region(layer, x):
        runs.append(x.device.type)
        return layer(x).tanh()

    with FakeTensorMode():
        layer, x = build()
        engine.checkpoint(region, layer, x).sum().backward()
    assert runs == ["cpu", "cpu"]
    assert isinstance(x.grad, FakeTensor)
    assert x.grad.shape == (2, 20)


@pytest.mark.case("K3")
def test_a_compiled_block_inside_an_eager_call(engine):
    """Rule 1: several sequence lengths are alive at once, and a replay may pick another compiled graph."""
    layer = nn.Linear(6, 6)
    runs = []
    lengths = (4, 7, 9, 4)

    def block(x):
        return torch.tanh(layer(x) / x.shape[0]).sum(0) + x.mean(0)

    compiled = torch.compile(block, backend="eager")

    def region(x):
        runs.append(x.shape[0])
        return compiled(x) * 2

    def grads(call):
        layer.zero_grad()
        inputs = [torch.ones(n, 6).cumsum(0).div(n).requires_grad_() for n in lengths]
        outs = [call(x) for x in inputs]
        for out in outs[::-1]:
            out.square().sum().backward()
        return [x.grad for x in inputs], layer.weight.grad

    got = grads(lambda x: engine.checkpoint(region, x))
    assert runs == [*lengths, *lengths[::-1]]
    torch.testing.assert_close(got, grads(lambda x: block(x) * 2))


class Stored:
    def __init__(self, tensor):
        self.copy = tensor.detach().numpy().copy()


@pytest.mark.case("K4")
def test_offloading_hooks_around_a_call_see_what_crosses_its_border(engine, same):
    """Rule 1: outer hooks move the inputs of a call and never what is inside."""
    packed, unpacked = [], []
    w1, w2 = torch.randn(3, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return Stored(tensor)

    def unpack(stored):
        unpacked.append(stored.copy.shape)
        return torch.from_numpy(stored.copy)

    def region(t, scale):
        return (t @ w1).tanh() @ w2 * scale["s"]

    def grads(call, hooks):
        w1.grad = w2.grad = None
        x = torch.linspace(0, 1, 6).view(2, 3).requires_grad_()
        with hooks:
            out = call(region, x * 1, {"s": 2.0}).add(1)
        out.sum().backward()
        return x.grad, w1.grad, w2.grad

    want = grads(lambda function, *args: function(*args), torch.enable_grad())
    same(grads(engine.checkpoint, torch.autograd.graph.saved_tensors_hooks(pack, unpack)), want)
    assert (packed, unpacked) == ([(2, 3)], [(2, 3)])
    same(grads(engine.checkpoint, torch.autograd.graph.save_on_cpu()), want)
