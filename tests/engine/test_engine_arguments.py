"""What goes into a call and what comes out: a replay sees what forward saw, the caller what the plain call gives."""

import collections
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.utils._pytree import register_dataclass

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Bundle:
    weight: torch.Tensor
    name: str


register_dataclass(Bundle)

CONTAINERS = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"left": a, "right": b},
    "named tuple": Pair,
    "ordered dict": lambda a, b: collections.OrderedDict(left=a, right=b),
    "default dict": lambda a, b: collections.defaultdict(list, left=a, right=b),
    "deque": lambda a, b: collections.deque([a, b], maxlen=2),
    "nested": lambda a, b: {"deep": [({"left": a},), Pair(b, None)]},
}


def tensors_of(container):
    return torch.utils._pytree.tree_leaves(container)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_in_containers_get_their_gradients(same_grads, kind):
    """Rule 1: wherever a tensor stands in the arguments, its gradient is that of the plain call."""

    def program(call):
        a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)

        def product(parts):
            left, right = (leaf for leaf in tensors_of(parts) if leaf is not None)
            return (left * right).sin()

        call(product, CONTAINERS[kind](a, b)).sum().backward()
        return a.grad, b.grad

    same_grads(program)


@pytest.mark.only("hooks", because="the other engine replays with leaves that stand for the inputs")
@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_replay_gets_a_container_of_the_same_type_and_not_the_callers(engine, kind):
    """Rule 3: containers are taken apart in forward and put together again for the replay."""
    seen = []

    def function(parts):
        seen.append(parts)
        return sum(leaf.exp() for leaf in tensors_of(parts) if leaf is not None)

    container = CONTAINERS[kind](torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True))
    engine.checkpoint(function, container).sum().backward()
    forward, replay = seen
    assert forward is container
    assert type(replay) is type(forward)
    assert replay is not forward or isinstance(replay, tuple)
    assert [a is b for a, b in zip(tensors_of(replay), tensors_of(forward), strict=True)].count(False) == 0


def test_a_registered_dataclass_is_taken_apart(engine, same):
    """Rule 3: what is registered with torch's pytree is a known container; the caller may refill it after forward."""
    x, weight = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    bundle = Bundle(weight, "first")
    out = engine.checkpoint(lambda t, bundle: (t * bundle.weight).sin(), x, bundle)
    bundle.weight = torch.zeros(3)
    out.sum().backward()
    same((x.grad, weight.grad), torch.autograd.grad((x * weight).sin().sum(), (x, weight)))


def test_a_list_filled_by_the_function_is_filled_once(engine):
    """Rule 3: the function appends to an argument; the caller's list shows forward alone."""
    x, log = torch.randn(3, requires_grad=True), []

    def function(t, log):
        log.append(len(log))
        return t.exp() * len(log)

    engine.checkpoint(function, x, log).sum().backward()
    assert log == [0]
    torch.testing.assert_close(x.grad, x.detach().exp(), rtol=0, atol=0)


def test_containers_changed_by_the_caller_after_forward_are_as_forward_saw_them(engine, same):
    """Rule 3: lists and dicts may be emptied, refilled and reordered before backward."""
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    parts, options = [a, [b, 2.0]], {"scale": 3.0}
    out = engine.checkpoint(lambda parts, options: (parts[0] * parts[1][0] * options["scale"]).sin(), parts, options)
    parts[1].clear()
    parts.reverse()
    options["scale"] = 0.0
    out.sum().backward()
    same((a.grad, b.grad), torch.autograd.grad((a * b * 3.0).sin().sum(), (a, b)))


def test_one_container_passed_twice_is_one_container_in_the_replay(engine):
    """Rule 3: what was the same object in forward is the same object in the replay."""
    identical = []

    def function(first, second, *, third):
        identical.append(first is second and second[1] is third)
        return first[0].exp()

    inner = {"k": 1}
    outer = [torch.randn(3, requires_grad=True), inner]
    engine.checkpoint(function, outer, outer, third=inner).sum().backward()
    assert identical == [True, True]


def test_a_list_that_holds_itself_goes_in_and_comes_back(engine):
    """Rule 3: a container in a circle is taken apart and put together as a circle."""
    x = torch.randn(3, requires_grad=True)
    circle = [x]
    circle.append(circle)
    found = []

    def function(parts):
        found.append(parts[1] is parts)
        return parts[0].exp()

    engine.checkpoint(function, circle).sum().backward()
    assert found == [True, True]
    torch.testing.assert_close(x.grad, x.detach().exp(), rtol=0, atol=0)


def test_one_tensor_passed_twice_gets_the_sum_of_both_gradients(same_grads):
    """Rule 1: the same tensor in two places is one input."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        call(lambda a, b, *, c: (a * b).sin() + c.exp(), x, x, c=x).sum().backward()
        return x.grad

    same_grads(program)


def test_keywords_arrive_in_the_order_of_the_call(engine):
    """Rule 3: ``**kwargs`` of the function keep their order in the replay."""
    orders = []

    def function(**parts):
        orders.append(list(parts))
        return parts["z"].exp()

    engine.checkpoint(function, z=torch.ones(2, requires_grad=True), a=1, m=None).sum().backward()
    assert orders == [["z", "a", "m"]] * 2


def test_objects_that_are_no_containers_arrive_as_they_are(engine):
    """Rule 3: modules, strings, arrays and the user's own objects are passed through by identity."""
    marker, layer = object(), nn.Linear(3, 3)
    seen = []

    def function(x, *others):
        seen.append(others)
        return others[1](x).tanh()

    engine.checkpoint(function, torch.randn(2, 3), marker, layer, "name", {1, 2}, range(3)).sum().backward()
    assert all(mine is theirs for mine, theirs in zip(*seen, strict=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def method(self, x, scale):
        return self.lin(x).tanh() * scale

    def forward(self, x, scale):
        return self.method(x, scale)


CALLABLES = {
    "module": lambda model: model,
    "bound method": lambda model: model.method,
    "partial": lambda model: functools.partial(model.method, scale=2.0),
    "closure": lambda model: lambda x, scale: model.method(x * 2, scale),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_any_callable_can_be_checkpointed(same_grads, kind):
    """Rule 1: modules, bound methods, partials and closures are functions."""

    def program(call):
        model, x = Model(), torch.randn(2, 3, requires_grad=True)
        call(CALLABLES[kind](model), x, scale=2.0).sum().backward()
        return x.grad, model.lin.weight.grad, model.lin.bias.grad

    same_grads(program)


def test_inputs_without_gradient_and_frozen_parameters_get_none(same_grads):
    """Rule 1: only what asks for a gradient gets one."""

    def program(call):
        frozen, trained = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
        x, mask = torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool)
        out = call(lambda x, mask: trained(frozen(x).tanh()).masked_fill(mask, 0.5) + trained.bias, x, mask)
        out.sum().backward()
        return x.grad, frozen.weight.grad, trained.weight.grad, trained.bias.grad

    same_grads(program)


OUTPUTS = {
    "none": lambda t: None,
    "number": lambda t: 3,
    "tensor and none": lambda t: (t.exp(), None),
    "dict of lists": lambda t: {"a": [t.exp(), t.sin()], "n": 2},
    "input itself": lambda t: t,
    "input and result": lambda t: (t, t.exp()),
    "view of the input": lambda t: t[1:],
    "integer tensor": lambda t: (t.exp(), t.argmax()),
    "detached": lambda t: (t.exp(), t.sin().detach()),
    "one result twice": lambda t: (t.exp(),) * 2,
    "empty list": lambda t: [],
}


@pytest.mark.only("hooks", because="outputs of the other engine are all of one node")
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_are_those_of_the_plain_call(same_grads, kind):
    """Rule 1: values, containers, ``requires_grad`` and gradients of any output."""

    def program(call):
        x = torch.randn(4, requires_grad=True)
        out = call(OUTPUTS[kind], x)
        tensors = [leaf for leaf in tensors_of(out) if isinstance(leaf, torch.Tensor)]
        flags = [(leaf.requires_grad, leaf.is_leaf, leaf.dtype) for leaf in tensors]
        roots = [leaf.sum() for leaf in tensors if leaf.requires_grad]
        if roots:
            sum(roots).backward()
        return flags, [leaf.detach() for leaf in tensors], x.grad

    same_grads(program)


@pytest.mark.only("hooks", because="outputs of the other engine are all of one node")
def test_an_output_that_is_the_input_is_the_same_object(engine):
    """Rule 1: no copy and no alias stands between the function and the caller."""
    x, state = torch.randn(3, requires_grad=True), object()
    out, same_state = engine.checkpoint(lambda t, s: (t, s), x, state)
    assert out is x
    assert same_state is state


@pytest.mark.only("hooks", because="the other engine replays with leaves that stand for the inputs")
def test_a_parameter_given_as_an_argument_is_a_parameter_in_the_replay(engine):
    """Rule 3: inputs arrive as the objects they were."""
    parameter = nn.Parameter(torch.randn(3))
    kinds = []

    def function(p):
        kinds.append((type(p), p is parameter))
        return p.exp()

    engine.checkpoint(function, parameter).sum().backward()
    assert kinds == [(nn.Parameter, True)] * 2


def test_results_of_torch_with_named_fields_are_containers(same_grads):
    """Rule 1: what ``max`` and friends return, and packed sequences, go in whole."""

    def program(call):
        x, lstm = torch.randn(4, 2, 3, requires_grad=True), nn.LSTM(3, 2)
        best = call(lambda best: best.values.exp() * best.indices, (x * 1).max(0))
        packed = nn.utils.rnn.pack_padded_sequence(x * 1, torch.tensor([4, 2]))
        read = call(lambda packed: lstm(packed)[0].data.sin(), packed)
        (best.sum() + read.sum()).backward()
        return x.grad, lstm.weight_ih_l0.grad

    same_grads(program)


class Named(Pair):
    """A tuple with attributes of its own."""


@dataclasses.dataclass
class Batch:
    data: torch.Tensor
    name: str = "none"


register_dataclass(Batch, field_names=["data"], drop_field_names=["name"])


def test_what_a_container_would_lose_stays_as_it_is(same_grads):
    """Rule 3: attributes of a tuple, and fields that a registration drops, are there in the replay."""

    def program(call):
        pair, batch = Named(torch.randn(3, requires_grad=True), torch.randn(3)), Batch(torch.randn(3), "three")
        pair.scale = 3.0

        def function(pair, batch):
            assert batch.name == "three"
            return (pair.left * pair.right * pair.scale * batch.data).sin()

        call(function, pair, batch).sum().backward()
        return pair.left.grad

    same_grads(program)
