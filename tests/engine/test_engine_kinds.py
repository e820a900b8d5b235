"""Kinds of tensors: complex, meta, fake, sparse, jagged, subclasses, DTensor, and what is no floating number."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floating_and_complex_types(same_grads, dtype):
    """Rule 1: saved tensors come back in their type."""

    def program(call):
        x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
        w = torch.randn(4, 4, dtype=dtype, requires_grad=True)
        out = call(lambda a, b: torch.tanh(a @ b).exp(), x, w)
        out.abs().float().sum().backward()
        return out.detach(), x.grad, w.grad

    same_grads(program)


def test_conjugate_and_negative_views(same_grads):
    """Rule 1: lazy conjugation and negation survive being saved."""

    def program(call):
        x = torch.randn(3, dtype=torch.complex64, requires_grad=True)
        out = call(lambda z: z.conj() * z.imag * z.sin().conj().imag, x)
        out.abs().sum().backward()
        return x.grad

    same_grads(program)


def test_integer_and_boolean_tensors_among_the_saved(same_grads):
    """Rule 1: indices and masks are saved tensors too."""

    def program(call):
        x, index = torch.randn(5, 3, requires_grad=True), torch.tensor([4, 0, 2])

        def region(t, index):
            picked = torch.nn.functional.embedding(index, t)
            values, places = picked.max(0)
            return torch.where(picked > 0, picked.sin(), picked.cos()).sum(0) * values + places

        call(region, x, index).sum().backward()
        return x.grad

    same_grads(program)


def test_empty_and_scalar_tensors(same_grads):
    """Rule 1: no elements, and one without a dimension."""

    def program(call):
        x, scale = torch.randn(0, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        (call(lambda t, s: (t * s).sin().sum() + s.exp(), x, scale)).backward()
        return x.grad, scale.grad

    same_grads(program)


def test_meta_tensors(engine, counted):
    """Rule 1: shapes flow through forward, replay and backward, and no memory is touched."""
    region = counted(lambda x, w: torch.dropout(torch.tanh(x @ w), 0.5, True).sin())
    x = torch.randn(2, 3, device="meta", requires_grad=True)
    w = torch.randn(3, 4, device="meta", requires_grad=True)
    engine.checkpoint(region, x, w).sum().backward()
    assert region.runs == 2
    assert (x.grad.shape, w.grad.shape, w.grad.is_meta) == ((2, 3), (3, 4), True)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_fake_tensors_with_nesting_and_second_order(engine):
    """Rule 1: a memory estimate of a whole step, checkpoints in checkpoints included."""
    with FakeTensorMode():
        x, w = torch.randn(2, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        out = engine.checkpoint(lambda x: engine.checkpoint(lambda h: (h @ w).tanh(), x.sin()).exp(), x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert isinstance(x.grad, FakeTensor)
    assert (x.grad.shape, w.grad.shape) == ((2, 4), (4, 4))


def test_sparse_tensors(same_grads):
    """Rule 1: a sparse matrix among the inputs, and one made inside."""

    def program(call):
        dense = torch.randn(3, 2, requires_grad=True)
        sparse = torch.eye(3).to_sparse()
        out = call(
            lambda m, d: torch.sparse.mm(m, d.sin()).exp() + (torch.eye(3).to_sparse() @ d).tanh(), sparse, dense
        )
        out.sum().backward()
        return dense.grad

    same_grads(program)


def test_jagged_tensors_among_inputs_and_outputs(same_grads):
    """Rule 4: the symbolic length of a jagged input is the same in forward and replay."""

    def program(call):
        values = torch.randn(6, 3, requires_grad=True)
        offsets = torch.tensor([0, 2, 3, 6])
        jagged = torch.nested.nested_tensor_from_jagged(values * 1, offsets)
        out = call(lambda j: (j.sin() * 2).exp(), jagged)
        out.values().sum().backward()
        return values.grad

    same_grads(program)


def test_a_jagged_tensor_of_other_rows_is_a_mismatch(engine):
    """Rule 4: a symbolic length may differ by name, the values behind it may not differ in number."""
    values, lengths = torch.randn(6, 3, requires_grad=True), [torch.tensor([2, 1, 3])]

    def region(v):
        offsets = torch.cat([lengths[0].new_zeros(1), lengths[0].cumsum(0)])
        return torch.nested.nested_tensor_from_jagged(v[: int(offsets[-1])].sin(), offsets).exp().values().tanh()

    out = engine.checkpoint(region, values)
    lengths[0] = torch.tensor([2, 1, 2])
    with pytest.raises(RuntimeError, match="differ"):
        out.sum().backward()
    assert values.grad is None


class Tagged(torch.Tensor):
    """A subclass that follows its results through ``__torch_function__``."""


@pytest.mark.only("hooks", because="the other engine replays with leaves that stand for the inputs")
def test_subclasses_with_torch_function(same_grads):
    """Rule 1: type and values of results of a subclass."""

    def program(call):
        raw = torch.randn(3, requires_grad=True)
        kinds = []

        def region(t):
            kinds.append(type(t) is Tagged)
            return t.sin().exp()

        out = call(region, (raw * 1).as_subclass(Tagged))
        out.sum().backward()
        return type(out) is Tagged, set(kinds), raw.grad

    same_grads(program)


class Wrapped(torch.Tensor):
    """A wrapper without storage of its own, as quantised and distributed tensors are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Wrapped({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return value.inner if isinstance(value, cls) else value

        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda value: cls(value) if isinstance(value, torch.Tensor) else value, out)


@pytest.mark.parametrize("early_stop", [True, False])
def test_subclasses_with_torch_dispatch(same_grads, early_stop):
    """Rule 1: a wrapper without storage goes in, is saved, and comes back."""

    def program(call):
        x, w = Wrapped(torch.randn(3, 4)).requires_grad_(), Wrapped(torch.randn(4, 4)).requires_grad_()
        call(lambda a, b: torch.tanh(a @ b).sigmoid(), x, w).sum().backward()
        return x.grad.inner, w.grad.inner

    same_grads(program, early_stop=early_stop)


def test_an_input_of_a_subclass_changed_in_place_is_refused(engine):
    """Rule 4: the wrapper's own counter tells."""
    x, other = torch.randn(3, requires_grad=True), Wrapped(torch.randn(3))
    out = engine.checkpoint(lambda a, b: (Wrapped(a) * b).sin(), x, other)
    other.add_(1)
    with pytest.raises(RuntimeError, match="in place"):
        out.sum().backward()


@pytest.mark.only("hooks", because="the other engine has no selective checkpointing")
@pytest.mark.parametrize("keep", [None, torch.ops.aten.mm.default], ids=["replayed", "kept"])
def test_distributed_tensors(same_grads, one_rank, keep):
    """Rule 1: DTensor on one rank, replayed whole or with its products kept."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def program(call):
        x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()]).requires_grad_()
        out = call(lambda a, b: torch.tanh(torch.tanh(a @ b) @ b), x, w)
        out.sum().full_tensor().backward()
        return out.full_tensor().detach(), x.grad.full_tensor(), w.grad.full_tensor()

    same_grads(program, policy_fn=None if keep is None else (lambda ctx, op, *args, **kwargs: op is keep))


@pytest.mark.only(
    "hooks",
    because="each call of the other engine adds up what it captures or shares by itself, which may round differently",
)
def test_distributed_data_parallel(same_grads, one_rank):
    """Rule 1: DDP counts each parameter's gradient once, though the function that uses it runs twice."""
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Net(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.call = call

        def forward(self, x):
            h = self.call(lambda t: self.first(t).tanh(), x)
            return self.call(lambda t: self.second(t).sin() + self.first(t), h)

    def program(call):
        net = DistributedDataParallel(Net(call))
        for _ in range(2):
            net(torch.randn(3, 4)).square().sum().backward()
        return [p.grad for p in net.parameters()]

    same_grads(program)
