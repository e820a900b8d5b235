"""The split of one backward: dx gives the inputs', dw the parameters' gradients; together they are plain backward's."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef

from regrow._core.split import Split, edges_of

SEED = 7


class Twice(torch.autograd.Function):
    """Counts how often its backward runs."""

    runs = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        Twice.runs += 1
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Chain(nn.Module):
    """Layers in a row."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4), nn.Tanh())

    def forward(self, x):
        return (self.layers(x),)


class Shared(nn.Module):
    """One scale between layers, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.one = nn.Linear(4, 4)

    def forward(self, x):
        h = self.one(x * self.scale).sin()
        h = nn.functional.linear(h * self.scale, self.one.weight.t())
        return (h * self.scale,)


class Derived(nn.Module):
    """Parameters that reach the line through operators of their own, one of them at two places."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x):
        both = (self.a.exp() * self.b).t()
        h = (x @ both).sin() @ (self.c * 2).tanh()
        return (h @ both + self.b.sum(),)


class Outputs(nn.Module):
    """Several outputs: one of parameters alone, one that needs no gradient, one that is the input."""

    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return (x @ self.w).sin(), self.v.exp(), torch.ones(4), x * 1, self.w.sum()


class Custom(nn.Module):
    """A custom Function between operators, and frozen parameters."""

    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return (self.frozen(Twice.apply(x.sin(), self.w).exp() @ self.v),)


class Branches(nn.Module):
    """The line parts and meets again; one node has two outputs, one of them unused."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 4), nn.Linear(2, 4)

    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        values, _ = torch.max(self.left(a.sin()) * self.right(b), dim=-1, keepdim=True)
        return (values + self.left(b),)


class Named(torch.autograd.Function):
    """A custom Function that keeps something under the name that accumulators have."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.variable = weight.detach()
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Looks(nn.Module):
    """A weight of such a Function, used a second time."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (Named.apply(x.sin(), self.w).exp() @ self.w,)


class Mixed(nn.Module):
    """Computed from two parameters, one of which is used elsewhere, too."""

    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ Twice.apply(self.p, self.q) + x.sin() @ self.p,)


class PassesItsWeight(nn.Module):
    """A parameter among the outputs."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.w, self.w


MODULES = [Chain, Shared, Derived, Outputs, Custom, Branches, Looks, Mixed, PassesItsWeight]


def grads_for(outputs):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(o.shape, generator=generator) if o.requires_grad else None for o in outputs]


def plain(module, x):
    outputs = module(x)
    grads = grads_for(outputs)
    roots = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
    return [x.grad, *(p.grad for p in module.parameters())]


def split_backward(module, x):
    outputs = module(x)
    split = Split(edges_of(outputs), edges_of([x]))
    grads = grads_for(outputs)
    (dx,) = split.dx(grads)
    assert x.grad is None
    return split, dx


def make(cls, **options):
    torch.manual_seed(SEED)
    return cls(**options), torch.randn(3, 4, requires_grad=True)


@pytest.mark.parametrize("cls", MODULES)
@pytest.mark.parametrize("times", [1, 2])
def test_both_passes_together_are_plain_backward(same, cls, times):
    """Rule 25: bit for bit, also where gradients are accumulated onto earlier ones; dx leaves parameters alone."""
    module, x = make(cls)
    other, y = make(cls)
    for _ in range(times):
        x.grad = y.grad = None
        want = plain(module, x)
        before = [None if p.grad is None else p.grad.clone() for p in other.parameters()]
        split, dx = split_backward(other, y)
        same([p.grad for p in other.parameters()], before)
        split.dw()
        same([dx, *(p.grad for p in other.parameters())], want)


@pytest.mark.parametrize("cls", [Chain, Branches])
def test_it_is_torchs_split_where_torchs_is_right(same, cls):
    """Rule 25: the same gradients as stage_backward_input and stage_backward_weight."""
    module, x = make(cls)
    outputs = list(module(x))
    grads, groups = stage_backward_input(outputs, grads_for(outputs), [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    other, y = make(cls)
    split, dx = split_backward(other, y)
    split.dw()
    same([dx, *(p.grad for p in other.parameters())], [grads[0], *(p.grad for p in module.parameters())])


def test_torch_refuses_a_parameter_that_is_used_twice():
    """The reason for a split of our own."""
    module, x = make(Shared)
    outputs = list(module(x))
    _, groups = stage_backward_input(outputs, grads_for(outputs), [x], module.parameters())
    with pytest.raises(RuntimeError, match="a second time"):
        stage_backward_weight(module.parameters(), groups)


@pytest.mark.parametrize("cls", MODULES)
def test_hooks_of_parameters_run_once_and_in_dw(cls):
    """Rule 25: hooks on the tensor and after accumulation, as often and with the same gradient as in plain backward."""

    def counting(module):
        seen = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad, name=name: seen.append((name, "hook", grad.sum().item())))
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: seen.append((name, "after", p.grad.sum().item()))
                )
        return seen

    module, x = make(cls)
    want = counting(module)
    plain(module, x)
    other, y = make(cls)
    seen = counting(other)
    split, _ = split_backward(other, y)
    assert seen == []
    split.dw()
    assert sorted(seen) == sorted(want)


def test_hooks_of_activations_do_not_count_twice(same):
    """Rule 25: dw starts from the gradient that the hook has seen."""

    def run(module, x):
        h = module[0](x)
        h.register_hook(lambda grad: grad * 2)
        return (module[1](h.sin()),)

    def net():
        torch.manual_seed(SEED)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)

    module, x = net()
    run(module, x)[0].square().sum().backward()
    other, y = net()
    outputs = run(other, y)
    loss = outputs[0].square().sum()
    split = Split(edges_of([loss]), edges_of([y]))
    (dx,) = split.dx([torch.ones(())])
    split.dw()
    same([dx, *(p.grad for p in other.parameters())], [x.grad, *(p.grad for p in module.parameters())])


def test_a_custom_function_runs_once():
    """Rule 25: it computes everything at once, so its parameters' gradients wait for dw ready-made."""
    module, x = make(Custom)
    Twice.runs = 0
    split, _ = split_backward(module, x)
    split.dw()
    assert Twice.runs == 1


def test_what_is_computed_from_parameters_alone_runs_once():
    """Rule 25: in dx or in dw, also where one of the parameters is used a second time."""
    module, x = make(Mixed)
    Twice.runs = 0
    split, _ = split_backward(module, x)
    split.dw()
    assert Twice.runs == 1


def test_gradients_that_activations_retain_are_those_of_one_backward(same):
    """Rule 25: the second pass adds nothing to them."""

    def run(split_it):
        torch.manual_seed(SEED)
        one, two = nn.Linear(4, 4), nn.Linear(4, 4)
        x = torch.randn(3, 4, requires_grad=True)
        h = one(x)
        h.retain_grad()
        loss = two(h.sin()).square().sum()
        if not split_it:
            loss.backward()
        else:
            split = Split(edges_of([loss]), edges_of([x]))
            split.dx([torch.ones(())])
            split.dw()
        return h.grad, one.weight.grad

    same(run(True), run(False))


def test_products_are_not_computed_twice():
    """Rule 25: a matrix product runs once for the input and once for the weight."""
    module, x = make(Chain)
    outputs = module(x)
    split = Split(edges_of(outputs), edges_of([x]))
    with torch.profiler.profile() as profile:
        split.dx(grads_for(outputs))
        split.dw()
    assert sum(event.name == "aten::mm" for event in profile.events()) == 4


def test_inputs_without_gradient_and_outputs_without_gradients(same):
    """Rule 25: everything is left to dw; several inputs, some of them unused."""
    module, x = make(Chain)
    want = plain(module, x)[1:]
    other, y = make(Chain)
    outputs = other(y.detach())
    split = Split(edges_of(outputs), edges_of([y.detach(), torch.ones(2, requires_grad=True), 3]))
    assert split.dx(grads_for(outputs)) == (None, None, None)
    split.dw()
    same([p.grad for p in other.parameters()], want)


def test_no_gradient_arrives(same):
    """Rule 25: the next stage had none to give."""
    module, x = make(Chain)
    split = Split(edges_of(module(x)), edges_of([x]))
    assert split.dx([None]) == (None,)
    split.dw()
    assert all(p.grad is None for p in module.parameters())


def test_a_finished_split_says_so():
    """Rule 25: dw runs once."""
    module, x = make(Chain)
    split, _ = split_backward(module, x)
    split.dw()
    with pytest.raises(RuntimeError, match="finished"):
        split.dw()


@pytest.mark.parametrize("finish", [True, False])
def test_nothing_outlives_it(finish):
    """Rule 12: after dw, or when it is dropped in between, no activation and no gradient is left."""
    module, x = make(Chain)
    alive = []

    def run():
        h = module.layers[:3](x)
        alive.append(StorageWeakRef(h.untyped_storage()))
        outputs = (module.layers[3:](h),)
        split = Split(edges_of(outputs), edges_of([x]))
        grads = grads_for(outputs)
        alive.extend(StorageWeakRef(grad.untyped_storage()) for grad in split.dx(grads))
        if finish:
            split.dw()
            del outputs, h
            assert alive[0].expired()

    gc.disable()
    try:
        run()
        assert all(storage.expired() for storage in alive)
    finally:
        gc.enable()
