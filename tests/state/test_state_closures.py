"""Like D1: variables that a function closes over. A replay sees what forward saw, whatever they were set to since."""

import enum
import gc
import math
from functools import partial, wraps

import numpy as np
import pytest
import torch
from torch import nn


def test_the_variable_of_a_loop(same_in_any_way):
    """Rule 24: each replay runs its own layer, not the last one."""

    def program(run):
        layers = [nn.Linear(4, 4) for _ in range(3)]
        x = torch.randn(3, 4, requires_grad=True)
        h = x
        for layer in layers:
            h = run(lambda t: layer(t).sin(), h)  # noqa: B023
        run.backward(h.sum())
        return x.grad, [layer.weight.grad for layer in layers]

    same_in_any_way(program)


class Choice(enum.IntEnum):
    SIN = 1
    EXP = 2


class Sine:
    def __call__(self, t):
        return t.sin()


class Exponential:
    def __call__(self, t):
        return t.exp()


KINDS = {
    "a number": ([0.5, 2.0, 3.0], lambda t, each: t * each),
    "a flag": ([True, False], lambda t, each: t.sin() if each else t.exp()),
    "a tensor": ([torch.ones(4) * 2, torch.ones(4) * 3], lambda t, each: t * each),
    "a function": ([torch.sin, torch.exp], lambda t, each: each(t)),
    "a function of Python": ([lambda t: t.sin(), lambda t: t.exp() * 2], lambda t, each: each(t)),
    "a partial": ([partial(torch.mul, other=2.0), partial(torch.mul, other=3.0)], lambda t, each: each(t)),
    "a name": (["sin", "exp"], lambda t, each: getattr(t, each)()),
    "nothing at first": ([None, 2.0], lambda t, each: t.sin() if each is None else t * each),
    "a numpy number": ([np.float32(0.5), np.float32(2.0)], lambda t, each: t * float(each)),
    "a choice": ([Choice.SIN, Choice.EXP], lambda t, each: t.sin() if each is Choice.SIN else t.exp()),
    "a class": ([Sine, Exponential], lambda t, each: each()(t)),
    "an object": ([Sine(), Exponential()], lambda t, each: each(t)),
    "a slice": ([slice(0, 2), slice(1, 4)], lambda t, each: torch.cat([t[each].sin(), t])[:4]),
    "a tuple": ([(1.0, 2.0), (3.0, 4.0)], lambda t, each: t * each[0] + each[1]),
    "a list": ([[torch.sin], [torch.exp]], lambda t, each: each[0](t)),
    "a type": ([torch.float32, torch.float64], lambda t, each: t.to(each).sin().float()),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_a_variable_can_hold(same_in_any_way, name):
    """Rule 24: numbers and functions as well as tensors and modules."""
    values, use = KINDS[name]

    def program(run):
        x = torch.randn(4, requires_grad=True)
        h = x
        for each in values:
            h = run(lambda t, scale=1.5: use(t, each).sin() * scale, h)  # noqa: B023
        run.backward(h.exp().sum())
        return x.grad

    same_in_any_way(program)


@pytest.mark.parametrize("values", [(0.0, -0.0), (True, 1)], ids=["zeros", "truth"])
def test_numbers_that_are_equal_and_not_the_same(same_in_any_way, values):
    """Rule 24: the sign of a zero, and a flag that is one, count."""

    def program(run):
        x = torch.randn(4, requires_grad=True)
        h = x
        for each in values:
            h = run(lambda t: (t * (2.0 if each is True else math.copysign(3.0, each))).sin(), h)  # noqa: B023
        run.backward(h.sum())
        return x.grad

    same_in_any_way(program)


@pytest.mark.only("hooks", because="the other engine refuses a captured tensor with a graph of its own")
def test_a_tensor_that_has_died_since(same_in_any_way):
    """Rule 24: its successor may lie at the same address."""

    def program(run):
        x, losses = torch.randn(4, requires_grad=True), []
        for factor in range(1, 20):
            scale = torch.full((4,), float(factor))
            losses.append(run(lambda t: (t * scale).sin(), x).sum())  # noqa: B023
        scale = None
        for loss in losses:
            run.backward(loss)
        return x.grad

    same_in_any_way(program)


def test_a_variable_that_the_function_sets_is_its_own(engine):
    """Rule 24: the count goes on in the replay, as with torch; the function was told by is_recomputing."""
    runs = 0

    def function(x):
        nonlocal runs
        runs += 1
        return x.sin().exp()

    x = torch.randn(4, requires_grad=True)
    engine.checkpoint(function, x).sum().backward()
    assert runs == 2


def test_a_variable_that_a_function_inside_sets_is_its_own(engine):
    """Rule 24: also where a function defined inside sets it."""
    last = None

    def function(x):
        def note(t):
            nonlocal last
            last = t.detach()
            return t

        return note(x.sin()).exp()

    x = torch.randn(4, requires_grad=True)
    engine.checkpoint(function, x).sum().backward()
    assert last is not None


def test_a_variable_that_another_function_sets_during_forward_is_not_put_back(same_in_any_way):
    """Rule 24: forward itself changed it, so the value at its beginning is not what forward read."""

    def program(run):
        scale = torch.ones(4)

        def renew():
            nonlocal scale
            scale = torch.full((4,), 2.0)

        def function(x):
            renew()
            return (x * scale).sin()

        x = torch.randn(4, requires_grad=True)
        run.backward(run(function, x).sum())
        return x.grad

    same_in_any_way(program)


def test_a_variable_that_is_empty_and_a_function_that_calls_itself(same_in_any_way):
    """Rule 24: cells may be empty, and may hold the function."""

    def program(run):
        def function(x, depth=2):
            if depth == 9:
                return later
            return x.exp() if depth == 0 else function(x.sin(), depth - 1)

        x = torch.randn(4, requires_grad=True)
        out = run(function, x)
        later = None
        run.backward(out.sum())
        return x.grad, later

    same_in_any_way(program)


@pytest.mark.only("hooks", because="the other engine refuses a captured tensor with a graph of its own")
def test_a_result_that_takes_the_variables_place_is_collected(engine):
    """Rule 12: the frame holds what the variable was, and that does not hold the frame."""

    alive = []

    def run():
        h = torch.randn(4, requires_grad=True) * 1
        for _ in range(3):
            h = engine.checkpoint(lambda y: (h * y).sin(), h)  # noqa: B023
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage()))
        h.sum().backward()

    gc.disable()
    try:
        run()
        assert all(storage.expired() for storage in alive)
    finally:
        gc.enable()


def test_a_variable_that_a_helper_sets_and_the_function_reads(same_in_any_way):
    """Rule 24: they share the variable in the replay as they did in forward."""

    def program(run):
        current = 0.0

        def put(value):
            nonlocal current
            current = value

        def function(t):
            put(2.0)
            a = (t * current).sin()
            put(3.0)
            return (a * current).sin()

        x = torch.randn(4, requires_grad=True)
        out = run(function, x)
        current = 0.0
        run.backward(out.sum())
        return x.grad

    same_in_any_way(program)


def test_two_helpers_that_share_a_variable(same_in_any_way):
    """Rule 24: what one pushes the other gets, also where the variable was set anew since."""

    def program(run):
        stack = []

        def push(t):
            stack.append(t)

        def get():
            return stack.pop()

        def function(t):
            push(t.sin())
            return get().exp()

        x = torch.randn(4, requires_grad=True)
        out = run(function, x)
        stack = []
        run.backward(out.sum())
        return x.grad

    same_in_any_way(program)


def test_a_function_that_calls_itself_reads_forwards_variables_at_every_level(same_in_any_way):
    """Rule 24: the function in its own variable is the rebuilt one."""

    def program(run):
        x = torch.randn(4, requires_grad=True)
        h = x
        for scale in (0.5, 2.0):

            def function(t, depth=2):
                t = (t * scale).sin()  # noqa: B023
                return function(t, depth - 1) if depth else t

            h = run(function, h)
        run.backward(h.sum())
        return x.grad

    same_in_any_way(program)


def test_a_local_name_of_a_helper_is_not_the_variable(same_in_any_way):
    """Rule 24: a function inside has a variable of its own of that name, and sets that."""

    def program(run):
        x = torch.randn(4, requires_grad=True)
        h = x
        for scale in (0.5, 2.0):

            def function(t):
                def inner():
                    scale = 1.0

                    def innermost():
                        nonlocal scale
                        scale += 1.0

                    innermost()
                    return scale

                return (t * inner()).sin()

            def outer(t, function=function):
                return function(t) * scale  # noqa: B023

            h = run(outer, h).sin()
        run.backward(h.sum())
        return x.grad

    same_in_any_way(program)


def test_rebuilt_functions_keep_what_was_set_on_them(same_in_any_way):
    """Rule 24: attributes, name, what a decorator wraps."""

    def program(run):
        x = torch.randn(4, requires_grad=True)
        h = x
        for scale in (0.5, 2.0):

            def act(t):
                return (t * scale * act.gain).sin()  # noqa: B023

            act.gain = 2.0

            @wraps(act)
            def wrapped(t):
                assert wrapped.__wrapped__.__name__ == "act"
                return act(t).exp()

            h = run(wrapped, h)
        run.backward(h.sum())
        return x.grad

    same_in_any_way(program)


@pytest.mark.parametrize("by_helper", [True, False])
def test_a_result_that_the_function_leaves_in_a_variable_is_collected(engine, by_helper):
    """Rule 12: an auxiliary loss, read once and forgotten."""
    alive = []

    def run():
        aux = None

        def put(value):
            nonlocal aux
            aux = value

        def function(t):
            nonlocal aux
            h = t.sin()
            if by_helper:
                put(h.square().sum())
            else:
                aux = h.square().sum()
            return h.exp()

        out = engine.checkpoint(function, torch.randn(4, requires_grad=True))
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(out.untyped_storage()))
        (out.sum() + aux).backward(retain_graph=True)
        aux = None

    gc.disable()
    try:
        run()
        assert all(storage.expired() for storage in alive)
    finally:
        gc.enable()


def test_functions_that_close_over_one_another_are_walked_once(engine):
    """Rule 12: forty of them, each of which sees all others."""
    helpers = []

    def make(index):
        def helper(t):
            return helpers[(index + 1) % 40](t) if index < 39 else t.sin()

        return helper

    a, b, c, d, e = (make(index) for index in range(5))

    def one(t):
        return two(t), three, four, a, b, c, d, e

    def two(t):
        return t.sin() if t is not None else (one, three, four, a, b)

    def three(t):
        return one, two, four, c, d

    def four(t):
        return one, two, three, e

    x = torch.randn(4, requires_grad=True)
    engine.checkpoint(lambda t: one(t)[0].exp(), x).sum().backward()
    assert torch.equal(x.grad, (x.detach().sin().exp() * x.detach().cos()))
