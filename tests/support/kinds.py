"""Features of kinds of tensors and of operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.engine.test_engine_kinds import Wrapped
from tests.support.calls import grads, leaf
from tests.support.matrix import Call, feature

KINDS = "Kinds of tensors and operators"


@feature(KINDS, "complex numbers, conjugate views")
def complex_numbers(call: Call) -> Any:
    x, w = leaf(4, 4, dtype=torch.complex128), leaf(4, 4, dtype=torch.complex128)
    call(lambda t: torch.fft.fft(t @ w.conj()).angle() + (t * w).abs(), x).sum().backward()
    return grads(x, w)


@feature(KINDS, "bfloat16 and float64")
def types(call: Call) -> Any:
    x, w = leaf(dtype=torch.float64), leaf(4, 4, dtype=torch.bfloat16)
    call(lambda t: (t.bfloat16() @ w).tanh().double() * t, x).sum().backward()
    return grads(x, w)


@feature(KINDS, "empty tensors, and one without a dimension")
def empty(call: Call) -> Any:
    x, scale = leaf(0, 3), torch.tensor(2.0, requires_grad=True)
    call(lambda t, s: (t * s).sin().sum() + s.exp(), x, scale).backward()
    return grads(x, scale)


@feature(KINDS, "channels last")
def channels_last(call: Call) -> Any:
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.AvgPool2d(2)), torch.randn(2, 3, 6, 6)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    out = call(lambda t: net(t).sin(), x)
    out.sum().backward()
    return out.stride(), grads(x, net)


@feature(KINDS, "sparse matrices, given and made inside")
def sparse(call: Call) -> Any:
    dense, matrix = leaf(3, 2), torch.eye(3).to_sparse()

    def function(m, d):
        return torch.sparse.mm(m, d.sin()).exp() + (torch.eye(3).to_sparse() @ d).tanh()

    call(function, matrix, dense).sum().backward()
    return dense.grad


@feature(KINDS, "nested tensors (jagged)")
def jagged(call: Call) -> Any:
    values = leaf(6, 3)
    nested = torch.nested.nested_tensor_from_jagged(values * 1, torch.tensor([0, 2, 3, 6]))
    out = call(lambda j: (j.sin() * 2).exp(), nested)
    out.values().sum().backward()
    return values.grad


@feature(KINDS, "DTensor")
def distributed(call: Call) -> Any:
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()]).requires_grad_()
    call(lambda a, b: torch.tanh(torch.tanh(a @ b) @ b), x, w).sum().full_tensor().backward()
    return x.grad.full_tensor(), w.grad.full_tensor()


@feature(KINDS, "a subclass with `__torch_dispatch__`")
def dispatching(call: Call) -> Any:
    x, w = Wrapped(torch.randn(3, 4)).requires_grad_(), Wrapped(torch.randn(4, 4)).requires_grad_()
    call(lambda a, b: torch.tanh(a @ b).sigmoid(), x, w).sum().backward()
    return x.grad.inner, w.grad.inner


class Twice(torch.Tensor):
    """Its sines are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is torch.Tensor.sin else out


@feature(KINDS, "a subclass with `__torch_function__`, and backward from a tensor of it")
def with_torch_function(call: Call) -> Any:
    x = leaf()
    out = call(lambda t: t.sin().exp(), (x * 1).as_subclass(Twice))
    out.sum().backward()
    return type(out).__name__, x.grad


@feature(KINDS, "meta tensors")
def meta(call: Call) -> Any:
    x, w = leaf(2, 3, device="meta"), leaf(3, 4, device="meta")
    call(lambda a, b: torch.dropout(torch.tanh(a @ b), 0.5, True).sin(), x, w).sum().backward()
    return x.grad.shape, w.grad.shape, w.grad.is_meta


class Cube(torch.autograd.Function):
    """Saves an input and an output, and reads them twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x**3
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x, _), (again, y) = ctx.saved_tensors, ctx.saved_tensors
        return grad * 3 * x * again + 0 * y


@feature(KINDS, "a custom `autograd.Function` that reads its saved tensors twice")
def custom_function(call: Call) -> Any:
    x = leaf()
    call(lambda t: Cube.apply(t.sin()).cos(), x).sum().backward()
    return x.grad


@feature(KINDS, "scaled dot-product attention")
def attention(call: Call) -> Any:
    q, k, v = (leaf(2, 3, 5, 4) for _ in range(3))
    call(lambda a, b, c: scaled_dot_product_attention(a, b, c, is_causal=True).sin(), q, k, v).sum().backward()
    return grads(q, k, v)


@feature(KINDS, "recurrent layers (GRU with dropout)")
def recurrent(call: Call) -> Any:
    net, x = nn.GRU(4, 5, num_layers=2, dropout=0.3), leaf(6, 2, 4)
    call(lambda t: net(t)[0].sin(), x).sum().backward()
    return grads(x, net)
