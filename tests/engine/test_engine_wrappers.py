"""Wrapped modules and functions: each call is checkpointed, and nothing that walks the model sees it."""

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from regrow import apply_checkpointing, checkpoint_wrapper, is_recomputing, recompute_handle_collector_ctx


class Block(nn.Module):
    """A module with everything that has a name: parameters, a buffer, an attribute, a child."""

    def __init__(self, width=4):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.zeros(width))
        self.kind = "block"
        self.runs = 0

    def forward(self, x, gain=1.0, *, bias=None):
        self.runs += 1
        h = torch.tanh(self.lin(x)) * self.scale * gain + self.shift
        return h if bias is None else h + bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def is_checkpointed(module):
    """Whether a call of the module leaves a frame."""
    with recompute_handle_collector_ctx() as handles:
        module(torch.randn(2, 4, requires_grad=True))
    return len(handles) > 0


def step(module, seed=5):
    torch.manual_seed(seed)
    module.zero_grad()
    x = torch.randn(3, 4, requires_grad=True)
    out = module(x)
    out.square().sum().backward()
    return out.detach(), x.grad, [p.grad for p in module.parameters()]


def test_a_wrapped_module_is_the_module(same):
    """Rule 17: the object, its class for ``isinstance``, its attributes, its children."""
    block = Block()
    wrapped = checkpoint_wrapper(block)
    assert wrapped is block
    assert isinstance(wrapped, Block)
    assert (wrapped.kind, wrapped.lin.in_features) == ("block", 4)
    wrapped.kind = "other"
    assert wrapped.kind == "other"
    assert is_checkpointed(wrapped)


def test_wrapped_and_plain_give_the_same(same):
    """Rule 1: values and gradients, dropout included, and each block runs twice."""
    plain = Net()
    wrapped = copy.deepcopy(plain)
    for index in range(3):
        checkpoint_wrapper(wrapped.blocks[index])
    same(step(wrapped), step(plain))
    assert [block.runs for block in wrapped.blocks] == [2, 2, 2]


def test_every_walk_sees_the_names_of_the_module():
    """Rule 17: parameters, buffers, modules and state, in their order."""
    plain, wrapped = Net(), Net()
    apply_checkpointing(wrapped, (Block, nn.Sequential))

    def names(net):
        walks = (net.named_parameters(), net.named_buffers(), net.named_modules(), net.state_dict().items())
        return [[name for name, _ in walk] for walk in walks]

    assert names(wrapped) == names(plain)


def test_state_goes_both_ways(same):
    """Rule 17: strict loading from and into a bare model."""
    plain, wrapped = Net(), Net()
    apply_checkpointing(wrapped, Block)
    wrapped.load_state_dict(plain.state_dict())
    fresh = Net()
    fresh.load_state_dict(wrapped.state_dict())
    same(fresh.state_dict(), plain.state_dict())


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "torch.save"])
def test_copies_are_wrapped_as_the_original_is(same, way):
    """Rule 17: state, training flag, hooks and options of a copy."""

    def copied(module):
        if way == "copy":
            return copy.copy(module)
        if way == "deepcopy":
            return copy.deepcopy(module)
        if way == "pickle":
            return pickle.loads(pickle.dumps(module))
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    original = checkpoint_wrapper(Block(), early_stop=False)
    original.register_forward_hook(double_the_output)
    original.eval()
    twin = copied(original)
    assert isinstance(twin, Block)
    assert type(twin) is type(original)
    assert not twin.training
    assert is_checkpointed(twin)
    same(step(twin), step(original))
    assert (twin.lin.weight is original.lin.weight) == (way == "copy")


def double_the_output(module, args, output):
    return output * 2


class Guarded(nn.Module):
    """A module that says itself how it is pickled."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.lock = object()

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["lock"]
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = "new"

    def forward(self, x):
        return self.lin(x).tanh()


@pytest.mark.parametrize("through", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_modules_own_way_to_be_pickled_is_used(through):
    """Rule 17: ``__getstate__`` and ``__setstate__`` are those of the module."""
    twin = through(checkpoint_wrapper(Guarded()))
    assert twin.lock == "new"
    assert is_checkpointed(twin)


class Rebuilt(nn.Module):
    """A module that says itself how it is built again."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.lin = nn.Linear(width, width)

    def __reduce__(self):
        return Rebuilt, (self.width,)

    def forward(self, x):
        return self.lin(x).tanh()


def test_a_modules_own_reduce_is_used():
    """Rule 17: what ``__reduce__`` of the module says is how its wrapped form is copied, too."""
    torch.manual_seed(1)
    plain = copy.copy(Rebuilt(4))
    torch.manual_seed(1)
    wrapped = copy.copy(checkpoint_wrapper(Rebuilt(4)))
    assert torch.equal(wrapped.lin.weight, plain.lin.weight)


def test_hooks_of_the_module_run_once_and_around_the_checkpoint():
    """Rule 17: forward hooks, pre-hooks and gradient hooks of the wrapped module itself."""
    log = []
    module = checkpoint_wrapper(Block())
    module.register_forward_pre_hook(lambda module, args: log.append(("pre", is_recomputing())))
    module.register_forward_hook(lambda module, args, out: log.append(("post", is_recomputing())))
    module.register_full_backward_pre_hook(lambda module, grad: log.append(("gradient of output", is_recomputing())))
    module.register_full_backward_hook(lambda module, into, out: log.append(("gradients", is_recomputing())))
    module(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert log == [("pre", False), ("post", False), ("gradient of output", False), ("gradients", False)]


def test_hooks_that_change_arguments_and_output_work(same):
    """Rule 1: what a pre-hook gives is what the function gets, in the replay too."""

    def hooked(wrap):
        torch.manual_seed(2)
        module = wrap(Block())
        module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        module.register_forward_hook(double_the_output)
        return step(module)

    same(hooked(checkpoint_wrapper), hooked(lambda module: module))


def test_train_and_eval_reach_the_inside(same):
    """Rule 17: the training flag is the module's."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    wrapped = checkpoint_wrapper(copy.deepcopy(plain))
    for mode in (False, True, False):
        plain.train(mode)
        wrapped.train(mode)
        assert [module.training for module in wrapped.modules()] == [mode] * 4
        if not mode:
            same(step(wrapped)[:2], step(plain)[:2])


def test_dtype_device_and_requires_grad_move_as_usual():
    """Rule 17: ``to``, ``double``, ``requires_grad_`` and ``apply`` work on the module itself."""
    module = checkpoint_wrapper(Block()).double().requires_grad_(False)
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert module(torch.randn(2, 4, dtype=torch.float64)).requires_grad is False
    assert module.to("meta").lin.weight.is_meta


def test_arguments_and_keywords_reach_forward(same):
    """Rule 1: positional, keyword-only, and what needs a gradient among them."""
    torch.manual_seed(3)
    plain = Block()
    wrapped = checkpoint_wrapper(copy.deepcopy(plain))

    def grads(module):
        torch.manual_seed(4)
        x, bias = torch.randn(2, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        module(x, 0.5, bias=bias).exp().sum().backward()
        return x.grad, bias.grad, module.scale.grad

    same(grads(wrapped), grads(plain))


def test_forward_called_by_name_is_checkpointed_too():
    """Rule 17: ``module.forward(x)`` and ``module(x)`` are the same function."""
    module = checkpoint_wrapper(Block())
    module.forward(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert module.runs == 2


class Derived(Block):
    def forward(self, x):
        return super().forward(x, 2.0).sin()


def test_super_in_forward_finds_the_base():
    """Rule 17: one class more does not confuse ``super()``, and the base is not checkpointed for itself."""
    module = checkpoint_wrapper(Derived())
    with recompute_handle_collector_ctx() as handles:
        module(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert (len(handles), module.runs) == (1, 2)


def test_other_instances_and_the_class_are_untouched():
    """Rule 23: wrapping changes one object."""
    plain, forward = Block(), Block.forward
    checkpoint_wrapper(Block())
    assert Block.forward is forward
    assert type(plain) is Block
    assert not is_checkpointed(plain)


def test_a_part_of_a_wrapped_sequential_is_a_plain_sequential():
    """Rule 17: ``net[0:2]`` builds a new module of the same class, which must work."""
    net = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = torch.randn(2, 4, requires_grad=True)
    part = net[0:2]
    torch.testing.assert_close(part(x), net[1](net[0](x)), rtol=0, atol=0)
    assert len(part) == 2


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_wrapped_lazy_module_stays_wrapped():
    """Rule 17: a lazy module takes another class when it sees its first input."""
    module = checkpoint_wrapper(nn.LazyLinear(3))
    module(torch.randn(2, 4))
    assert is_checkpointed(module)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight + weight.t()


BEFORE = pytest.param(
    "before",
    marks=pytest.mark.xfail(
        strict=True,
        raises=AttributeError,
        reason="torch takes the parametrized class off by name, and finds the wrapped one above it",
    ),
)


@pytest.mark.parametrize("order", [BEFORE, "after"])
def test_parametrizations_come_and_go(same, order):
    """Rule 17: torch changes the class of a parametrized module as well, whichever comes first."""
    plain, wrapped = nn.Linear(4, 4), nn.Linear(4, 4)
    wrapped.load_state_dict(plain.state_dict())
    parametrize.register_parametrization(plain, "weight", Symmetric())
    if order == "after":
        checkpoint_wrapper(wrapped)
    parametrize.register_parametrization(wrapped, "weight", Symmetric())
    if order == "before":
        checkpoint_wrapper(wrapped)
    same(step(wrapped), step(plain))
    parametrize.remove_parametrizations(plain, "weight")
    parametrize.remove_parametrizations(wrapped, "weight")
    same(step(wrapped), step(plain))


def test_classes_that_watch_their_subclasses_do_not_see_a_new_one():
    """Rule 17: a registry that ``__init_subclass__`` fills has the user's classes and no other."""
    registry = []

    class Registered(nn.Module):
        def __init_subclass__(cls, *, key, **kwargs):
            super().__init_subclass__(**kwargs)
            registry.append((key, cls.__name__))

        def forward(self, x):
            return x.sin()

    class Mine(Registered, key="mine"):
        pass

    module = checkpoint_wrapper(Mine())
    assert registry == [("mine", "Mine")]
    assert is_checkpointed(module)


def test_a_class_made_for_one_model_dies_with_it():
    """Rule 12: classes made in functions, with all they captured, are not kept by the wrapper."""

    def build():
        class Local(nn.Module):
            def forward(self, x):
                return x.sin()

        checkpoint_wrapper(Local())
        return weakref.ref(Local)

    local = build()
    gc.collect()
    assert local() is None


def test_a_wrapped_module_in_another_process_state(same):
    """Rule 17: a model pickled wrapped is the same model when the wrapping class has yet to be made."""
    import regrow.becoming

    blob = pickle.dumps(checkpoint_wrapper(Block()))
    regrow.becoming._subclasses.clear()
    twin = pickle.loads(blob)
    assert isinstance(twin, Block)
    assert is_checkpointed(twin)


def add_sine(x, y):
    """Adds a sine."""
    return x.sin() + y


def test_a_wrapped_function_keeps_its_name_and_doc(same):
    """Rule 17: functions are wrapped, not changed."""
    wrapped = checkpoint_wrapper(add_sine, early_stop=False)
    assert (wrapped.__name__, wrapped.__doc__) == ("add_sine", "Adds a sine.")
    assert wrapped is not add_sine
    assert not hasattr(add_sine, "__wrapped__")
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    same(torch.autograd.grad(wrapped(x, y=y).sum(), x), torch.autograd.grad(add_sine(x, y).sum(), x))


@pytest.mark.parametrize("make", [lambda block: block.forward, lambda block: functools.partial(block, gain=2.0)])
def test_other_callables_are_wrapped_as_functions(make):
    """Rule 17: bound methods and partials."""
    block = Block()
    checkpoint_wrapper(make(block))(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert block.runs == 2


SELECTIONS = {
    "a class": (Block, ["blocks.0", "blocks.1", "blocks.2"]),
    "classes": ((nn.Linear, nn.Dropout), ["stem", "blocks.0.lin", "blocks.1.lin", "blocks.2.lin", "head.0", "head.1"]),
    "a predicate": (lambda name, module: name.endswith("1") or name == "", ["", "blocks.1", "head.1"]),
}


@pytest.mark.parametrize("where", SELECTIONS)
def test_apply_wraps_what_is_selected_and_returns_it(same, where):
    """Rule 17: in the order of ``named_modules``; the model itself is the name ""."""
    selection, names = SELECTIONS[where]
    plain = Net()
    model = copy.deepcopy(plain)
    modules = dict(model.named_modules())
    returned = apply_checkpointing(model, selection)
    assert [module is modules[name] for module, name in zip(returned, names, strict=True)] == [True] * len(names)
    assert list(dict(model.named_modules())) == list(modules)
    same(step(model), step(plain))


def test_apply_wraps_a_shared_module_once(same):
    """Rule 17: one module under two names."""
    model = Net()
    model.blocks[2] = model.blocks[0]
    assert len(apply_checkpointing(model, Block)) == 2


def test_errors_name_the_module_path():
    """Rule 4: where the path is known, messages say it."""
    model = Net()
    apply_checkpointing(model, Block)
    x = torch.randn(2, 4, requires_grad=True)
    out = model.blocks[1](x)
    x.data = x.data  # no change of values
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"^blocks\.1 \(Block\.forward\): cannot replay"):
        out.sum().backward()


class Static(nn.Module):
    @staticmethod
    def forward(x):
        return x.sin().exp()


class OfTheClass(nn.Module):
    scale = 2.0

    @classmethod
    def forward(cls, x):
        return (x * cls.scale).sin().exp()


@pytest.mark.parametrize("cls", [Static, OfTheClass])
def test_a_forward_that_takes_no_module(same, counted, cls):
    """Rule 17: a static forward and one of the class are called as Python would call them."""
    x, y = (torch.linspace(-1, 1, 4).requires_grad_() for _ in range(2))
    cls()(x).sum().backward()
    module = checkpoint_wrapper(cls())
    with recompute_handle_collector_ctx() as handles:
        loss = module(y).sum()
    assert len(handles) == 1
    loss.backward()
    same(y.grad, x.grad)


REFUSED = {
    "nothing selected": (lambda: apply_checkpointing(Net(), nn.Conv2d), "where selects no module of Net.*Block"),
    "no model": (lambda: apply_checkpointing("net", Block), "model must be an nn.Module, got 'net'"),
    "a string": (lambda: apply_checkpointing(Net(), "Block"), "where must be"),
    "a class that is no module": (lambda: apply_checkpointing(Net(), int), "where must be"),
    "a predicate on the module alone": (lambda: apply_checkpointing(Net(), lambda module: True), "where must be"),
    "an empty tuple": (lambda: apply_checkpointing(Net(), ()), "where must be"),
    "a tuple with something else": (lambda: apply_checkpointing(Net(), (Block, int)), "where must be"),
    "an unknown option": (
        lambda: checkpoint_wrapper(Block(), early_stopp=True),
        "early_stopp: no option of checkpoint",
    ),
    "a bad option": (lambda: checkpoint_wrapper(Block(), early_stop=1), "early_stop must be True or False, got 1"),
    "no callable": (lambda: checkpoint_wrapper(3), "module_or_fn must be a module or a function, got 3"),
    "traced code": (lambda: checkpoint_wrapper(torch.fx.symbolic_trace(Block())), "whose forward is generated code"),
    "wrapped already": (lambda: checkpoint_wrapper(checkpoint_wrapper(Block())), "is wrapped already"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_refused_by_name(mistake):
    """Rule 19: the argument, its value, what is allowed."""
    attempt, says = REFUSED[mistake]
    with pytest.raises(ValueError, match=says):
        attempt()


def test_apply_checks_all_before_it_wraps_one():
    """Rule 19: a module that cannot be wrapped leaves the model as it was."""
    model = Net()
    model.blocks[2].forward = lambda x: x
    with pytest.raises(ValueError, match=r"blocks\.2 has a forward of its own instance"):
        apply_checkpointing(model, Block)
    assert [type(block) for block in model.blocks] == [Block] * 3


def test_options_reach_every_call():
    """Rule 5: here that early stop is off."""
    module = checkpoint_wrapper(Tail(), early_stop=False)
    module(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert module.ends == 2


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.ends = 0

    def forward(self, x):
        out = x.sin() + 1
        self.ends += 1
        return out


def managed(mesh, *modules):
    from torch.distributed.fsdp import fully_shard

    for module in modules:
        fully_shard(module, mesh=mesh)


@pytest.mark.parametrize("order", ["wrap first", "shard first"])
def test_fully_sharded_blocks(one_rank, same, order):
    """Rule 17: FSDP2 takes a class of its own too; both orders train as the plain model does."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    plain = Net()
    model = copy.deepcopy(plain)
    if order == "wrap first":
        apply_checkpointing(model, Block)
    managed(mesh, *model.blocks, model)
    if order == "shard first":
        apply_checkpointing(model, Block)
    for _ in range(2):
        got, want = step(model), step(plain)
        same(got[:2], want[:2])
        same([grad.full_tensor() for grad in got[2]], want[2])
    assert [block.runs for block in model.blocks] == [4, 4, 4]
    assert list(model.state_dict()) == list(plain.state_dict())
