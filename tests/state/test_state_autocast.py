"""Like B2: autocast. A replay computes in forward's types, whatever surrounds backward."""

import pytest
import torch
from torch import nn


def autocast(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", enabled=dtype is not None, dtype=dtype or torch.bfloat16, **options)


@pytest.fixture
def layers():
    """A program that makes its layers calls this; both runs draw the same weights."""
    return lambda: (nn.Linear(6, 6), torch.randn(3, 6, requires_grad=True))


@pytest.mark.only(
    "hooks", because="forward of the other engine casts without autocast's cache, so casts are added up apart"
)
@pytest.mark.parametrize("outside", [None, torch.bfloat16, torch.float16], ids=str)
def test_autocast_inside_the_function_nests_in_that_of_forward(same_in_any_way, layers, outside):
    """Rule 3: regions that the function opens and closes find what they found in forward."""
    seen = []

    def program(run):
        layer, x = layers()

        def block(x):
            found = [(y := layer(x)).dtype]
            with autocast(None):
                found.append((y := layer(y.float())).dtype)
                with autocast(torch.float16):
                    found.append((y := y @ y.t() @ y).dtype)
            found.append((y := layer(y.float())).dtype)
            seen.append(found)
            return y.float().tanh().exp()

        with autocast(torch.bfloat16):
            out = run(block, x)
        with autocast(outside):
            run.backward(out.sum())
        return x.grad, layer.weight.grad

    same_in_any_way(program)
    assert seen == [[torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]] * len(seen)


@pytest.mark.only(
    "hooks", because="forward of the other engine casts without autocast's cache, so casts are added up apart"
)
@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
def test_the_cache_of_casts_is_on_or_off_as_in_forward(same_in_any_way, layers, cached):
    """Rule 3: with the cache a weight is cast once, without it at every use; the replay does the same."""

    def program(run):
        layer, x = layers()

        def block(x):
            flag = 2.0 if torch.is_autocast_cache_enabled() else 3.0
            return (layer(layer(x)) * flag).float().sin()

        with autocast(cache_enabled=cached):
            out = run(block, x) + layer(x).float()
        with autocast(cache_enabled=not cached):
            run.backward(out.sum())
        return x.grad, layer.weight.grad

    same_in_any_way(program)


@pytest.mark.only(
    "hooks", because="forward of the other engine casts without autocast's cache, so casts are added up apart"
)
def test_a_weight_that_was_cast_before_the_call_is_cast_again(same_in_any_way, layers):
    """Rule 3: the cast that the surrounding region remembers is not there in the replay, and is not missed."""

    def program(run):
        layer, x = layers()
        with autocast():
            before = layer(x)
            out = run(lambda x: layer(x).relu().square(), before)
            out = out + layer(before)
        run.backward(out.float().sum())
        return x.grad, layer.weight.grad, layer.bias.grad

    same_in_any_way(program)


def test_a_region_without_autocast_stays_without(same_in_any_way, layers):
    """Rule 3: a call inside an island of full precision is replayed in full precision."""

    def program(run):
        layer, x = layers()
        with autocast():
            y = layer(x)
            with autocast(None):
                out = run(lambda y: layer(y.float()).exp(), y)
            out = out + layer(y)
        with autocast():
            run.backward(out.sum())
        return x.grad, layer.weight.grad

    same_in_any_way(program)


def test_autocast_set_for_the_thread_is_seen(same_in_any_way, layers):
    """Rule 3: the type of the thread counts, also where autocast is off or set without a context."""

    def program(run):
        layer, x = layers()
        was = torch.get_autocast_dtype("cpu")
        torch.set_autocast_dtype("cpu", torch.float16)
        try:

            def block(x):
                with torch.autocast("cpu", dtype=torch.get_autocast_dtype("cpu")):
                    return layer(x).sin()

            out = run(block, x)
        finally:
            torch.set_autocast_dtype("cpu", was)
        run.backward(out.float().sum())
        return x.grad, layer.weight.grad

    same_in_any_way(program)


def test_a_decorated_method_brings_its_own_autocast(same_in_any_way):
    """Rule 3: a method under an autocast decorator, with a part that is cast back, is replayed as it is."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x):
            y = self.layer(x)
            return y.float() * self.precise(y)

        @torch.autocast("cpu", enabled=False)
        def precise(self, y):
            return self.layer(y.float()).softmax(-1)

    def program(run):
        block, x = Block(), torch.randn(3, 6, requires_grad=True)
        with autocast(torch.float16):
            out = run(block, x)
        run.backward(out.sum())
        return x.grad, block.layer.weight.grad

    same_in_any_way(program)


def test_each_micro_batch_keeps_its_own_precision(same_in_any_way, layers):
    """Rule 3: two calls of one layer under different types are replayed each under its own."""

    def program(run):
        layer, x = layers()
        losses = []
        for dtype in (torch.bfloat16, None, torch.float16):
            with autocast(dtype):
                losses.append(run(lambda x: layer(x).tanh(), x).float().sum())
        for loss in losses:
            run.backward(loss)
        return x.grad, layer.weight.grad

    same_in_any_way(program)
