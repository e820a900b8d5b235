"""Like B4: forward on one thread, backward on another, and what the threads have of their own."""

import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import regrow
from tests.conftest import JOIN_S, run_on_thread


def net():
    return nn.Linear(6, 6), torch.randn(3, 6, requires_grad=True)


def noticing(layer, seen):
    """A function that notes the state of its thread."""

    def block(x):
        y = torch.dropout(layer(x), 0.5, True)
        seen.append((y.dtype, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return y.float().square().exp()

    return block


@pytest.mark.only("hooks", because="forward of the other engine records no graph")
def test_forward_on_a_foreign_thread(same_in_any_way, on_thread):
    """Rule 3: what forward's thread had, the replay's thread has, whichever of the two is the main one."""
    seen = []

    def program(run):
        layer, x = net()

        def forward():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return run(noticing(layer, seen), x).sum()

        run.backward(on_thread(forward))
        return x.grad, layer.weight.grad, torch.rand(2)

    same_in_any_way(program)
    assert seen == [(torch.bfloat16, True, True)] * len(seen)


@pytest.mark.only("hooks", because="forward of the other engine records no graph")
def test_a_thread_with_its_own_autocast_and_without_gradients(same_in_any_way):
    """Rule 3: the replay records a graph in forward's precision where backward's thread does neither."""
    seen = []

    def program(run):
        layer, x = net()
        loss = run(noticing(layer, seen), x).sum()

        inner = run.where

        def elsewhere(work):
            def body():
                with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
                    return work()

            return inner(body)

        run.where = elsewhere
        run.backward(loss)
        return x.grad, layer.weight.grad

    same_in_any_way(program)
    assert seen == [(torch.float32, False, True)] * len(seen)


def test_a_mode_and_a_device_of_the_thread_of_backward_stay_there(same_in_any_way):
    """Rule 3: a thread's own function modes are set aside for the replay and back behind it."""

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            assert func is not torch.dropout
            return func(*args, **(kwargs or {}))

    def program(run):
        layer, x = net()
        loss = run(noticing(layer, []), x).sum()
        inner = run.where

        def elsewhere(work):
            def body():
                with torch.device("meta"), Refusing():
                    work()
                    return torch.empty(1).device.type

            assert inner(body) == "meta"

        run.where = elsewhere
        run.backward(loss)
        return x.grad, layer.weight.grad

    same_in_any_way(program)


def test_two_threads_run_backward_of_one_model_one_after_the_other(same_in_any_way, on_thread):
    """Rule 24: buffers and random numbers are forward's on every thread, and moved once."""

    def program(run):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        xs = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
        losses = [run(model, x).square().sum() for x in xs]
        run.backward(losses[1])
        on_thread(lambda: run.backward(losses[0]))
        return *(x.grad for x in xs), model[0].weight.grad, model[1].running_mean, torch.rand(2)

    same_in_any_way(program)


@pytest.mark.parametrize("options", [{}, {"early_stop": False}], ids=["early stop", "to the end"])
def test_backwards_of_different_modules_at_the_same_time(engine, options):
    """Rule 24: replays on two threads at once put back the buffers that are their own."""

    def work(call, results, index):
        generator = torch.Generator().manual_seed(index)
        norm = nn.BatchNorm1d(4, affine=False)
        x = torch.randn(5, 4, generator=generator).requires_grad_()
        for _ in range(10):
            (call(norm, x).exp() * torch.arange(4.0)).sum().backward()
        results[index] = x.grad, norm.running_mean, norm.running_var, norm.num_batches_tracked

    want, got = {}, {}
    for index in range(2):
        work(lambda function, x: function(x), want, index)
    # The process has one stream of random numbers; two replays at once would wind it for each other.
    call = lambda function, x: engine.checkpoint(function, x, preserve_rng_state=False, **options)  # noqa: E731
    threads = [threading.Thread(target=work, args=(call, got, index)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index in range(2):
        for mine, plain in zip(got[index], want[index], strict=True):
            torch.testing.assert_close(mine, plain, rtol=0, atol=0)


class Slow(nn.Module):
    """Changes a buffer and lets others run while it computes."""

    def __init__(self, meet):
        super().__init__()
        self.meet = meet
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.scale.mul_(2)
        if regrow.is_recomputing():
            self.meet()
        return (x * self.scale.clone()).sin()


def test_two_replays_of_one_module_on_two_threads_take_turns(engine):
    """Rule 24: each begins with its own forward's buffers, and the module's own are there afterwards."""
    inside, met = [], []

    def meet():
        inside.append(1)
        threading.Event().wait(0.05)  # the other thread has the time to come in, if it may
        met.append(len(inside))
        inside.pop()

    model = Slow(meet)
    own = model.scale
    xs = [torch.randn(4, requires_grad=True) for _ in range(4)]
    losses = [engine.checkpoint(model, x).sum() for x in xs]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    for times, x in enumerate(xs, 1):
        assert torch.equal(x.grad, (x * 2.0**times).detach().cos() * 2.0**times)
    assert model.scale is own
    assert torch.equal(own, torch.full((4,), 16.0))
    assert met == [1] * 4


def test_a_mode_that_replays_switch_on_two_threads_comes_back(engine):
    """Rule 24: one replay does not take the mode of another for the module's own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    losses = [engine.checkpoint(model, torch.randn(3, 4)).sum() for _ in range(8)]
    model.eval()
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    assert not any(module.training for module in model.modules())


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_replays_inside_a_replay_do_not_wait_for_it(engine):
    """Rule 24: a gradient inside the function replays calls of the same module, on whichever thread it runs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def inner(x):
        return model(x).sin()

    def outer(x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            loss = engine.checkpoint(inner, y).exp().sum()
            (grad,) = run_on_thread(lambda: torch.autograd.grad(loss, y))
        return (model(x) * grad).sin()

    x = torch.randn(3, 4, requires_grad=True)
    loss = engine.checkpoint(outer, x).sum()
    run_on_thread(loss.backward)
    assert x.grad is not None
    assert model[1].num_batches_tracked == 2


def test_replays_of_modules_that_nothing_changes_do_not_wait(engine):
    """Rule 13: two threads are in replays of one module at once."""
    both = threading.Barrier(2, timeout=JOIN_S)
    layer = nn.Linear(4, 4)

    def function(x):
        if regrow.is_recomputing():
            both.wait()
        return layer(x).sin()

    losses = [engine.checkpoint(function, torch.randn(3, 4)).sum() for _ in range(2)]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    assert not both.broken
