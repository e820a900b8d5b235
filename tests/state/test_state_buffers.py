"""Like C1 and C2: modules that change buffers when they run. The second run must not show."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from regrow import StateChangedError


def everything(*modules):
    """The gradients and the state of modules."""
    gradients = [p.grad for module in modules for p in module.parameters()]
    return gradients, [dict(module.state_dict()) for module in modules], [m.training for m in modules]


NORMS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (3, 4, 5)),
    "BatchNorm2d, cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), (2, 4, 3, 3)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), (2, 4, 2, 2, 2)),
    "BatchNorm1d, no statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (3, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 3, 3)),
    "two in a row": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4, momentum=None)), (5, 4)),
}


@pytest.mark.parametrize("name", NORMS)
def test_statistics_move_once_per_step(same_in_any_way, name):
    """Rule 24: running statistics and batch counts are forward's alone."""
    make, shape = NORMS[name]

    def program(run):
        norm, found = make(), []
        for _ in range(2):
            x = torch.randn(shape, requires_grad=True)
            run.backward(run(norm, x).exp().sum())
            found.append(x.grad)
        return found, everything(norm)

    same_in_any_way(program)


class Scaled(nn.Module):
    """Scales by a history of maxima, as recipes of low precision do: the result depends on the buffers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("history", torch.zeros(4))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        y = (x * self.scale.clone() * self.weight).sin()
        with torch.no_grad():
            self.history.copy_(self.history.roll(1))
            self.history[0] = x.abs().max()
            self.scale.fill_(1 / (self.history.max() + 0.5))
            self.steps += 1
        return (y * self.scale.clone() + self.steps).exp()


class Reassigning(nn.Module):
    """Assigns its buffer anew instead of writing it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.count = self.count + 1
        return ((x - self.mean) * self.count.clone()).sin().exp()


class Late(nn.Module):
    """Registers its buffer in its first forward."""

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        self.mean.mul_(0.9)
        return (x * self.mean).exp().sin()


class Large(nn.Module):
    """Holds more than is copied without asking; part of it changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.ones(40_000))
        self.register_buffer("table", torch.arange(40_000.0))

    def forward(self, x):
        y = (x * self.memory[:4].clone() + self.table[:4]).sin()
        with torch.no_grad():
            self.memory.mul_(0.5)
        return (y * self.memory[:4].clone()).exp()


class Emptying(nn.Module):
    """Sets a buffer to None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("once", torch.full((4,), 3.0))

    def forward(self, x):
        factor = 1.0 if self.once is None else self.once
        self.once = None
        return (x * factor).sin().exp()


class Shared(nn.Module):
    """Has one buffer under two names and in two modules."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.child = nn.Module()
        self.child.register_buffer("same", self.count)

    def forward(self, x):
        self.count.add_(1)
        y = (x * self.child.same.clone()).sin()
        self.child.same.add_(1)
        return (y * self.count.clone()).exp()


class Rolling(nn.Module):
    """Writes its buffer through views, next to a normalisation that writes its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("window", torch.zeros(3, 4))

    def forward(self, x):
        row = self.window[1]
        row.add_(x.detach().mean(0))
        self.window[2:].mul_(2).add_(1)
        return (self.norm(x) * self.window.sum(0)).exp()


class Viewed(nn.Module):
    """Writes one buffer, reads another that is its base."""

    def __init__(self):
        super().__init__()
        self.register_buffer("all", torch.zeros(2, 4))
        self.register_buffer("first", self.all[0])

    def forward(self, x):
        self.first.add_(1)
        return (x * self.all.sum(0)).sin().exp()


class Filling(nn.Module):
    """Fills a buffer that was None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        self.mean = x.detach().mean(0) if self.mean is None else self.mean * 0.9
        return (x * self.mean).sin().exp()


class Deleting(nn.Module):
    """Deletes its buffer in its first forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("once", torch.full((4,), 3.0))

    def forward(self, x):
        if hasattr(self, "once"):
            x = x * self.once
            del self.once
        return x.sin().exp()


STATEFUL = [Scaled, Reassigning, Large, Emptying, Rolling]
LIVING = [Late, Filling, Deleting, Shared, Viewed]  # come, go, or share memory
ALL = [*STATEFUL, *LIVING]


@pytest.mark.parametrize("kind", ALL)
def test_buffers_that_a_result_depends_on_begin_as_forward_found_them(same_in_any_way, kind):
    """Rule 24: written, assigned, emptied, large or shared: the replay computes with forward's values."""

    def program(run):
        module, found = kind(), []
        for _ in range(2):
            x = torch.randn(3, 4, requires_grad=True)
            run.backward(run(module, x).sum())
            found.append(x.grad)
        return found, everything(module)

    same_in_any_way(program)


@pytest.mark.parametrize("kind", STATEFUL)
def test_two_micro_batches_each_see_the_state_of_their_own_forward(same_in_any_way, kind):
    """Rule 24: both forwards ran before either backward; the first replay begins before the second forward."""

    def program(run):
        module = kind()
        xs = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
        losses = [run(module, x).sum() for x in xs]
        for loss in losses:
            run.backward(loss)
        return *(x.grad for x in xs), everything(module)

    same_in_any_way(program)


@pytest.mark.parametrize("kind", [Scaled, Reassigning, Rolling])
def test_buffers_that_others_change_meanwhile_stay_as_they_left_them(same_in_any_way, kind):
    """Rule 24: the replay begins with forward's value and leaves the later one."""

    def program(run):
        module = kind()
        x = torch.randn(3, 4, requires_grad=True)
        out = run(module, x)
        for buffer in module.buffers(recurse=False):
            buffer.add_(7)
        run.backward(out.sum())
        return x.grad, everything(module)

    same_in_any_way(program)


POWER = {
    "spectral_norm": lambda: spectral_norm(nn.Linear(4, 4)),
    "parametrized": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "parametrized, three iterations": lambda: parametrizations.spectral_norm(nn.Linear(4, 4), n_power_iterations=3),
    "in a block": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4)),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("name", POWER)
def test_power_iterations_go_on_from_forwards_vectors(same_in_any_way, name):
    """Rule 24: the weight of the replay is that of forward, and u and v move once per step."""

    def program(run):
        module, found = POWER[name](), []
        for _ in range(2):
            x = torch.randn(3, 4, requires_grad=True)
            run.backward(run(module, x).exp().sum())
            found.append(x.grad)
        return found, everything(module)

    same_in_any_way(program)


@pytest.mark.parametrize("train_first", [True, False])
def test_train_and_eval_are_those_of_forward(same_in_any_way, train_first):
    """Rule 24: the mode that was switched since is back for the replay, of every part, and stays as it was set."""

    def program(run):
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Scaled()).train(train_first)
        module[1].eval()
        x = torch.randn(3, 4, requires_grad=True)
        out = run(module, x)
        module.train(not train_first)
        run.backward(out.sum())
        return x.grad, everything(*module), module.training

    same_in_any_way(program)


class Owner:
    """No module itself; its method is decorated."""

    def __init__(self, module):
        self.module = module


def twice(function):
    def wrapped(*args):
        return function(*args) * 2

    return wrapped


class Decorated(Scaled):
    """Runs through a decorated method."""

    @twice
    def step(self, x):
        return self.forward(x).sin()


GLOBAL = Scaled()


def by_global(module):
    global GLOBAL
    GLOBAL = module

    def function(x):
        return GLOBAL(x)

    return function


def by_list(modules):
    return lambda x: modules[1](modules[0](x))


def by_dict(modules):
    return lambda x: modules["b"](modules["a"](x))


REACHED = {
    "closure": lambda m: (lambda x: m(x).sin(),),
    "partial": lambda m: (partial(lambda module, x: module(x).sin(), m),),
    "partial by keyword": lambda m: (partial(lambda x, module: module(x).sin(), module=m),),
    "bound method": lambda m: (m.forward,),
    "decorated method": lambda m: (m.step,),
    "partial of a method": lambda m: (partial(m.step),),
    "global": lambda m: (by_global(m),),
    "list": lambda m: (by_list([m, nn.BatchNorm1d(4)]),),
    "module list": lambda m: (by_list(nn.ModuleList([m, nn.BatchNorm1d(4)])),),
    "dict": lambda m: (by_dict({"a": m, "b": nn.Tanh()}),),
    "argument": lambda m: (lambda x, module: module(x).sin(), m),
    "method as argument": lambda m: (lambda x, step: step(x).sin(), m.step),
    "decorated function": lambda m: (twice(lambda x: m(x).sin()),),
}
HIDDEN = {
    "list argument": lambda m: (lambda x, modules: modules[0](x).sin(), [m]),
    "dict argument": lambda m: (lambda x, modules: modules["a"](x).sin(), {"a": m}),
    "default": lambda m: (lambda x, module=m: module(x).sin(),),
}


@pytest.mark.parametrize("name", [*REACHED, *HIDDEN])
def test_a_module_is_found_however_it_is_reached(same_in_any_way, name):
    """Rule 24: closure, partial, method, global, container or argument: its buffers are put back."""

    def program(run):
        module, x = Decorated(), torch.randn(3, 4, requires_grad=True)
        function, *more = {**REACHED, **HIDDEN}[name](module)
        run.backward(run(function, x, *more).sum())
        return x.grad, everything(module)

    same_in_any_way(program)


class Router(nn.Module):
    """Counts the tokens of its experts, and favours those that had few so far."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("tokens", torch.zeros(3))
        self.register_buffer("bias", torch.zeros(3), persistent=False)

    def forward(self, x):
        weight, chosen = (self.gate(x) + self.bias).softmax(-1).max(-1)
        with torch.no_grad():
            self.tokens.add_(torch.bincount(chosen, minlength=3))
            self.bias.copy_(-self.tokens / 4)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


@pytest.mark.parametrize("batches", [1, 3])
def test_a_router_that_balances_itself_chooses_as_in_forward(same_in_any_way, batches):
    """Rule 24: the counters decide who gets a token; the replay decides as forward did, and counts nothing."""

    def program(run):
        router = Router()
        losses = [run(router, torch.randn(10, 4)).square().sum() for _ in range(batches)]
        for loss in losses:
            run.backward(loss)
        return everything(router)

    same_in_any_way(program)


def test_a_large_buffer_that_was_never_changed_and_then_is_is_refused(engine, anywhere):
    """Rule 24: no copy was taken, the old value is gone, and nothing accumulates."""
    module = nn.Module()
    module.register_buffer("table", torch.ones(40_000))
    x = torch.ones(4, requires_grad=True)

    def function(x):
        return (x * module.table[:4]).sin()

    engine.checkpoint(function, x)  # seen to leave the buffer alone
    loss = engine.checkpoint(function, x).sum()
    module.table.add_(1)
    with pytest.raises(StateChangedError, match="table") as refused:
        anywhere(loss.backward)
    assert (refused.value.names, x.grad) == (["module.table"], None)


def test_a_module_copied_after_forward_has_the_states_of_the_module(engine, anywhere):
    """Rule 24: buffers are still the tensors that state dictionaries and copies have seen."""
    module = Scaled()
    held = list(module.buffers())
    x = torch.randn(3, 4, requires_grad=True)
    anywhere(engine.checkpoint(module, x).sum().backward)
    twin = copy.deepcopy(module)
    assert all(mine is buffer for mine, buffer in zip(module.buffers(), held, strict=True))
    assert twin.state_dict().keys() == module.state_dict().keys()


def test_statistics_of_very_many_channels_move_once_per_step(same_in_any_way):
    """Rule 24: the size of a running mean decides nothing."""

    def program(run):
        norm, x = nn.BatchNorm1d(17_000), torch.randn(2, 17_000, requires_grad=True)
        run.backward(run(norm, x).sin().sum())
        return norm.running_mean.sum(), norm.running_var.sum()

    same_in_any_way(program)


def test_a_function_that_switches_the_mode_leaves_it_switched_back(engine, anywhere):
    """Rule 24: a replay that stops early, in the middle of eval mode, leaves train mode as it found it."""
    layer, x = nn.Dropout(0.5), torch.ones(4, requires_grad=True)

    def function(x):
        layer.eval()
        y = (layer(x) * 2).sin()
        layer.train()
        return y

    anywhere(engine.checkpoint(function, x).sum().backward)
    assert layer.training


class EqualByValue(nn.Module):
    """A module that says it equals another with the same configuration."""

    def __init__(self, value):
        super().__init__()
        self.width = 4
        self.register_buffer("factor", torch.full((4,), value))

    def __eq__(self, other):
        return isinstance(other, EqualByValue) and self.width == other.width

    def __hash__(self):
        return hash(self.width)

    def forward(self, x):
        return (x * self.factor).sin()


def test_modules_that_are_equal_by_value_keep_their_own_buffers(same_in_any_way):
    """Rule 24: a replay tells modules apart by identity."""

    def program(run):
        both, x = nn.Sequential(EqualByValue(2.0), EqualByValue(3.0)), torch.ones(4, requires_grad=True)
        run.backward(run(both, x).sum())
        return x.grad

    same_in_any_way(program)
