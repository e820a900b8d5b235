"""Like D1: variables that a function closes over. A replay sees what forward saw, whatever they were set to since."""

import gc
from functools import partial

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


KINDS = {
    "a number": ([0.5, 2.0, 3.0], lambda t, each: t * each),
    "a flag": ([True, False], lambda t, each: t.sin() if each else t.exp()),
    "a tensor": ([torch.ones(4) * 2, torch.ones(4) * 3], lambda t, each: t * each),
    "a function": ([torch.sin, torch.exp], lambda t, each: each(t)),
    "a function of Python": ([lambda t: t.sin(), lambda t: t.exp() * 2], lambda t, each: each(t)),
    "a partial": ([partial(torch.mul, other=2.0), partial(torch.mul, other=3.0)], lambda t, each: each(t)),
    "a name": (["sin", "exp"], lambda t, each: getattr(t, each)()),
    "nothing at first": ([None, 2.0], lambda t, each: t.sin() if each is None else t * each),
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
