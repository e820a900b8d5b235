"""Like C1 and C3: kinds of modules, and what they carry: scripted, lazy, buffers that need gradients, odd layouts."""

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import regrow


def test_a_scripted_part_keeps_its_buffers_to_itself(engine, anywhere):
    """Rule 24: what lies behind the script interpreter is not looked at, and does not stand in the way."""
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):  # as torch 2.14 has it
        part = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()))
    layer = nn.Linear(4, 4)
    x, y = (torch.linspace(-1, 1, 12).view(3, 4).requires_grad_() for _ in range(2))

    def function(x):
        return layer(part(x)).sin()

    function(x).exp().sum().backward()
    want = [p.grad for p in part.parameters()]
    part.zero_grad()
    loss = engine.checkpoint(function, y).exp().sum()
    anywhere(loss.backward)
    # The interpreter compiles as it goes: the last bit may differ between its first runs.
    torch.testing.assert_close([y.grad, *(p.grad for p in part.parameters())], [x.grad, *want])


def test_lazy_modules_see_their_first_input_in_forward(same_in_any_way):
    """Rule 24: parameters and buffers that do not exist yet; statistics move once in the first step, too."""

    def program(run):
        model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh())
        found = []
        for _ in range(2):
            x = torch.randn(3, 5, requires_grad=True)
            run.backward(run(model, x).exp().sum())
            found.append(x.grad)
        return found, [p.grad for p in model.parameters()], dict(model.state_dict())

    same_in_any_way(program)


class Carried(nn.Module):
    """A buffer that needs a gradient."""

    def __init__(self, make):
        super().__init__()
        self.register_buffer("state", make())

    def forward(self, x):
        return (x * self.state).sin().exp()


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere than in the output")
def test_a_buffer_that_needs_a_gradient(same_in_any_way):
    """Rule 24: the replay records as much as forward did, and the gradient goes to the buffer itself."""

    def program(run):
        model, x = Carried(lambda: torch.randn(4, requires_grad=True)), torch.randn(4, requires_grad=True)
        run.backward(run(model, x).sum())
        return x.grad, model.state.grad

    same_in_any_way(program)


class Recurrent(nn.Module):
    """Keeps its own result as a buffer, from one call to the next."""

    def __init__(self, detach):
        super().__init__()
        self.detach = detach
        self.register_buffer("state", torch.ones(4))

    def forward(self, x):
        h = (x * self.state).sin()
        self.state = h.detach() if self.detach else h
        return h.exp()


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere than in the output")
def test_a_buffer_that_carries_the_graph_from_call_to_call(same_in_any_way):
    """Rule 24: backpropagation through time; each replay starts from the state its own call found."""

    def program(run):
        model, x = Recurrent(False), torch.randn(4, requires_grad=True)
        losses = [run(model, x).sum() for _ in range(3)]
        run.backward(sum(losses))
        return x.grad, model.state.detach()

    same_in_any_way(program)


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere than in the output")
def test_a_buffer_that_forward_writes_in_place_although_it_has_a_graph(same_in_any_way):
    """Rule 24: the copy in its place is no leaf, as the buffer is none."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.ones(4, requires_grad=True) * 1)

        def forward(self, x):
            self.state.mul_(x)
            return (self.state * x).sin()

    def program(run):
        model, x = Writes(), torch.randn(4, requires_grad=True)
        run.backward(run(model, x).sum())
        return x.grad, model.state.detach()

    same_in_any_way(program)


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere than in the output")
@pytest.mark.parametrize("detach", [True, False])
def test_results_that_become_buffers_are_collected(engine, detach):
    """Rule 12: the frame of a step does not hold the result that holds the frame."""
    alive, model = [], Recurrent(detach)

    def step():
        model.state = torch.ones(4)
        out = engine.checkpoint(model, torch.randn(4, requires_grad=True))
        alive.append(StorageWeakRef(model.state.untyped_storage()))
        out.sum().backward()

    gc.disable()
    try:
        for _ in range(3):
            step()
        model.state = torch.ones(4)
        assert all(storage.expired() for storage in alive)
    finally:
        gc.enable()


LAYOUTS = {
    "expanded": lambda: torch.randn(1, 4).expand(300, 4),
    "part of a large one": lambda: torch.randn(10**6)[5:1205].view(300, 4),
    "transposed": lambda: torch.randn(4, 300).t(),
    "every other": lambda: torch.randn(600, 4)[::2],
    "empty": lambda: torch.empty(0, 4),
    "one number": lambda: torch.tensor(2.0),
    "complex": lambda: torch.randn(300, 4, dtype=torch.complex64).conj(),
    "conjugated": lambda: torch.randn(4, 300, dtype=torch.complex64).mH,
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "channels last": lambda: torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last),
}


def numbers(tensor):
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.imag + dense.real if dense.is_complex() else dense


class Reads(nn.Module):
    def __init__(self, buffers):
        super().__init__()
        for index, buffer in enumerate(buffers):
            self.register_buffer(f"b{index}", buffer)

    def forward(self, x):
        seen = [buffer.stride() for buffer in self.buffers() if buffer.layout is torch.strided]
        total = sum(numbers(buffer * x).sum() for buffer in self.buffers())
        return total.sin() * x, seen


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", LAYOUTS)
def test_buffers_of_any_layout(same_in_any_way, name):
    """Rule 24: a copy has the strides of what it stands for."""

    def program(run):
        model, x = Reads([LAYOUTS[name]()]), torch.randn((), requires_grad=True)
        out, seen = run(model, x)
        run.backward(out)
        return x.grad, seen

    same_in_any_way(program)


def test_a_copy_takes_no_more_than_what_is_seen(engine):
    """Rule 24: of a storage of megabytes, two buffers see a few hundred bytes; an expanded one is not spelled out."""
    base = torch.randn(10**6)
    model = Reads([base[8:24], base[16:48], torch.ones(1).expand(1000)])
    x = torch.randn((), requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        out, _ = engine.checkpoint(model, x)
        out.backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 10_000


def test_buffers_that_share_memory_share_it_in_the_replay(same_in_any_way):
    """Rule 24: what is written into one is seen in the other."""

    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            base = torch.ones(8)
            self.register_buffer("all", base)
            self.register_buffer("part", base[2:6])

        def forward(self, x):
            self.part.add_(1)
            return (x * self.all.clone()).sin()

    def program(run):
        model, x = Shares(), torch.randn(8, requires_grad=True)
        for _ in range(2):
            run.backward(run(model, x).sum())
        return x.grad, model.all

    same_in_any_way(program)


TOGGLES = {
    "a weight, off": (True, False),
    "a weight, on": (False, True),
}


@pytest.mark.parametrize("name", TOGGLES)
def test_a_parameter_that_is_frozen_or_thawed_between_forward_and_backward(same_in_any_way, name):
    """Rule 24: the graph of forward does not change, so the replay records with forward's flags."""
    before, after = TOGGLES[name]

    def program(run):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[0].requires_grad_(before)
        x = torch.randn(3, 4, requires_grad=True)
        loss = run(model, x).exp().sum()
        model[0].requires_grad_(after)
        run.backward(loss)
        return x.grad, model[2].weight.grad, [p.requires_grad for p in model.parameters()]

    same_in_any_way(program)


@pytest.mark.parametrize("before", [True, False])
def test_an_input_that_is_frozen_or_thawed_between_forward_and_backward(same_in_any_way, before):
    """Rule 24: as with parameters."""

    def program(run):
        x, gain = torch.randn(4).requires_grad_(before), torch.randn(4, requires_grad=True)
        loss = run(lambda x, gain: (x.exp() * gain).sin(), x, gain).sum()
        x.requires_grad_(not before)
        run.backward(loss)
        return gain.grad, x.requires_grad

    same_in_any_way(program)


def test_modules_without_hash_and_with_large_buffers(same_in_any_way):
    """Rule 24: modules are told apart by identity."""

    class Unhashable(nn.Module):
        __hash__ = None

        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(200, 200))

        def __eq__(self, other):
            return True

        def forward(self, x):
            return (x * self.table[0, 0]).sin()

    def program(run):
        one, two, x = Unhashable(), Unhashable(), torch.randn(4, requires_grad=True)
        for _ in range(2):
            run.backward(run(lambda x: two(one(x)), x).sum())
        return x.grad

    same_in_any_way(program)
    assert not regrow.is_recomputing()


def test_a_buffer_and_its_conjugate(same_in_any_way):
    """Rule 24: one storage, two readings of it."""

    def program(run):
        base = torch.randn(4, dtype=torch.complex64)
        model, x = Reads([base, base.conj()]), torch.randn((), requires_grad=True)
        run.backward(run(model, x)[0])
        return x.grad

    same_in_any_way(program)


def test_a_buffer_of_a_wrapper_subclass(same_in_any_way):
    """Rule 24: it has no storage of its own to copy a part of."""
    from torch.testing._internal.two_tensor import TwoTensor

    def program(run):
        buffer = TwoTensor(torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4)).t()
        model, x = Reads([buffer]), torch.randn((), requires_grad=True)
        run.backward(run(lambda t: (model.b0.a * t).sin().sum(), x))
        return x.grad

    same_in_any_way(program)


def test_attributes_of_a_buffer_are_there_in_the_replay(same_in_any_way):
    """Rule 24: as of scales that know their axis."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.full((4,), 2.0))
            self.scale.axis = 0

        def forward(self, x):
            return (x * self.scale).sum(self.scale.axis).sin()

    def program(run):
        x = torch.randn(4, 3, requires_grad=True)
        run.backward(run(lambda t: model(t.t()), x).sum())
        return x.grad

    model = Scale()
    same_in_any_way(program)


class Table(nn.Module):
    """Writes a large buffer in every forward."""

    def __init__(self, writes):
        super().__init__()
        self.writes = writes
        self.register_buffer("table", torch.ones(200, 200))

    def forward(self, x):
        if self.writes:
            self.table.add_(1)
        return (x * self.table[0, 0].clone()).sin()


def test_a_large_buffer_that_one_of_many_calls_writes(same_in_any_way):
    """Rule 24: the calls that reach it and leave it alone do not speak for the one that writes it."""

    def program(run):
        model = nn.ModuleList([Table(False), Table(True)])
        x = torch.randn(4, requires_grad=True)
        for _ in range(3):
            h = x
            for index in range(2):
                h = run(lambda t: model[index](t) * 1, h)  # noqa: B023
            run.backward(h.sum())
        return x.grad, model[1].table[0, 0]

    same_in_any_way(program)


def test_a_module_that_the_function_freezes_and_thaws(same_in_any_way):
    """Rule 24: the stop leaves no flag behind."""

    def program(run):
        model, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)

        def function(x):
            model.requires_grad_(False)
            out = model(x).sin()
            model.requires_grad_(True)
            return out

        run.backward(run(function, x).sum())
        return x.grad, [p.requires_grad for p in model.parameters()]

    same_in_any_way(program)


@pytest.mark.only("hooks", because="the other engine has no selective checkpointing")
def test_copies_of_buffers_are_no_operators_of_a_policy_around(engine):
    """Rule 16: an inner call that copies a buffer in forward and not in the outer replay runs the same operators."""
    table = Table(False)

    def outer(t):
        return engine.checkpoint(table, t.sin()).exp()

    x = torch.randn(4, requires_grad=True)
    out = engine.checkpoint(outer, x, policy_fn=lambda ctx, op, *a, **k: op is torch.ops.aten.sin.default)
    out.sum().backward()
    want = torch.autograd.grad(table(x.sin()).exp().sum(), x)[0]
    assert torch.equal(x.grad, want)


class Tied(nn.Module):
    """Two calls of one layer."""

    def __init__(self, run):
        super().__init__()
        self.layer, self.other, self.run = nn.Linear(2, 2), nn.Linear(2, 2), run

    def forward(self, x):
        return self.run(lambda t: self.layer(t).sin(), self.run(lambda t: self.layer(t).tanh().exp(), x))


def test_plain_tensors_that_stood_for_parameters_stand_there_in_the_replay(same_in_any_way):
    """Rule 24: as in `functional_call`, which has put the module's own parameters back by then; they stay there."""

    def program(run):
        model = Tied(run)
        own = dict(model.named_parameters())
        weight, x = torch.eye(2).requires_grad_(), torch.ones(1, 2).requires_grad_()
        out = torch.func.functional_call(model, {"layer.weight": weight}, (x,))
        run.backward(out.sum())
        assert dict(model.named_parameters()) == own
        return x.grad, weight.grad, [p.grad for p in own.values()]

    same_in_any_way(program)


def test_own_parameters_are_back_after_a_replay_that_fails(engine):
    """Rule 24: a replay that raises leaves the module as it was."""
    layer, weight = nn.Linear(2, 2), torch.eye(2).requires_grad_()
    own = dict(layer.named_parameters())

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return engine.checkpoint(function, x)

    def function(t):
        if regrow.is_recomputing():
            assert layer.weight is weight
            raise ZeroDivisionError
        return layer(t).sin()

    loss = torch.func.functional_call(Net(), {"layer.weight": weight}, (torch.ones(1, 2, requires_grad=True),)).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert dict(layer.named_parameters()) == own


@pytest.mark.only("hooks", because="the other engine refuses what it captures with a graph of its own")
def test_plain_tensors_with_a_graph_stand_for_parameters(same_in_any_way):
    """Rule 24: weights that are computed outside, as in a hypernetwork."""

    def program(run):
        weight, x = torch.eye(2).requires_grad_(), torch.ones(1, 2).requires_grad_()
        out = torch.func.functional_call(Tied(run), {"layer.weight": weight.exp()}, (x,))
        run.backward(out.sum())
        return x.grad, weight.grad

    same_in_any_way(program)


def test_a_plain_tensor_with_a_graph_is_refused_by_the_reentrant_engine():
    """Rule 35: a captured tensor with a graph of its own, by the name of the parameter that it stands for."""
    weight = torch.eye(2).requires_grad_()
    model = Tied(partial(regrow.checkpoint, use_reentrant=True))
    with pytest.raises(ValueError, match=r"captures 'self\.layer\.weight', a tensor that was computed outside"):
        torch.func.functional_call(model, {"layer.weight": weight * 2}, (torch.ones(1, 2),))


class OfItsOwn(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize(
    "made",
    [lambda t: t.as_subclass(OfItsOwn).requires_grad_(), nn.Parameter, lambda t: t.requires_grad_()],
    ids=["subclass", "parameter", "plain"],
)
def test_what_stood_for_parameters_stands_there_whatever_it_is(same_in_any_way, made):
    """Rule 24: by `functional_call`, and one stood for a parameter that is None."""

    def program(run):
        model, x = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
        given = {"0.weight": made(torch.randn(4, 4)), "0.bias": made(torch.randn(4))}
        net = Tied(run)
        net.layer = model
        out = torch.func.functional_call(net, {f"layer.{name}": tensor for name, tensor in given.items()}, (x,))
        run.backward(out.as_subclass(torch.Tensor).sum())
        assert model[0].bias is None
        return x.grad, *(tensor.grad.as_subclass(torch.Tensor) for tensor in given.values())

    same_in_any_way(program)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("now", ["none", "another"])
def test_a_distributed_parameter_that_another_object_stands_for(same_grads, now):
    """Rule 24: one that is cut the same way, or none, is no shard of it: forward's stands there in the replay."""
    mesh = init_device_mesh("cpu", (1,))

    def shared(tensor):
        return nn.Parameter(distribute_tensor(tensor, mesh))

    def program(call):
        layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
        layer.weight, layer.bias = shared(layer.weight.detach()), shared(layer.bias.detach())
        was = layer.bias
        out = call(lambda t: layer(t).sin(), distribute_tensor(x, mesh))
        layer.bias = None if now == "none" else shared(torch.full((4,), 3.0))
        out.sum().backward()
        return x.grad, layer.weight.grad.full_tensor(), was.grad.full_tensor()

    same_grads(program)


@pytest.mark.usefixtures("one_rank")
def test_plain_tensors_stand_for_distributed_parameters(same_in_any_way):
    """Rule 24: what `functional_call` puts in their place is no parameter, so no shard either."""
    mesh = init_device_mesh("cpu", (1,))

    def program(run):
        model, weight, x = Tied(run), torch.eye(2).requires_grad_(), torch.ones(1, 2).requires_grad_()
        bias = torch.zeros(2).requires_grad_()
        for name in ("weight", "bias"):
            setattr(model.layer, name, nn.Parameter(distribute_tensor(getattr(model.layer, name).detach(), mesh)))
        out = torch.func.functional_call(model, {"layer.weight": weight, "layer.bias": bias}, (x,))
        run.backward(out.sum())
        return x.grad, weight.grad, bias.grad

    same_in_any_way(program)
