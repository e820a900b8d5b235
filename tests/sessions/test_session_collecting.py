"""The collector: which calls leave a handle, in which list, in which order."""

import pytest
import torch

from regrow import clear_recompute_session, recompute_handle, recompute_handle_collector_ctx
from tests.sessions.calls import checkpoint

pytestmark = pytest.mark.usefixtures("on_each_engine")


def collected(function, *args, **kwargs):
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(function, *args, **kwargs)
    return output, handles


def test_handles_come_in_forward_order(make_block, x):
    """Rule 21: one handle per call, in forward order."""
    blocks = [make_block(seed=seed) for seed in range(3)]
    with recompute_handle_collector_ctx() as handles:
        output = x
        for block in blocks:
            output = checkpoint(block, output)
    order = []
    for handle in handles:
        before = [block.runs for block in blocks]
        recompute_handle(handle, "s")
        order.append([block.runs - runs for block, runs in zip(blocks, before, strict=True)].index(1))
    assert order == [0, 1, 2]


def test_the_innermost_collector_collects(block, x):
    """Rule 21: collectors nest, each call goes to the innermost list."""
    with recompute_handle_collector_ctx() as outer:
        first = checkpoint(block, x)
        with recompute_handle_collector_ctx() as inner:
            second = checkpoint(block, first)
        third = checkpoint(block, second)
    assert (len(outer), len(inner), third.requires_grad) == (2, 1, True)


def test_nothing_is_collected_after_a_collector_was_left_by_an_exception(block, x):
    """Rule 21: a collector ends with its context, also by an exception; the outer one collects again."""
    with recompute_handle_collector_ctx() as outer:
        with pytest.raises(ZeroDivisionError), recompute_handle_collector_ctx() as inner:
            raise ZeroDivisionError
        output = checkpoint(block, x)
    late = checkpoint(block, output)
    assert (len(outer), len(inner), late.requires_grad) == (1, 0, True)


def test_a_call_whose_forward_raises_is_taken_out(block, make_block, x):
    """Rule 21: a frame whose forward raises is taken out, its neighbours stay."""
    failing = make_block()

    def fail(runs):
        raise ZeroDivisionError

    failing.halfway = fail
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
        with pytest.raises(ZeroDivisionError):
            checkpoint(failing, output)
        output = checkpoint(block, output)
    assert len(handles) == 2


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_an_inner_forward_that_raises_leaves_the_outer_call(x):
    """Rule 21: only the call that raised is taken out, not the one that caught it."""

    def fail(y):
        y.sin()
        raise ZeroDivisionError

    def outer(y):
        with pytest.raises(ZeroDivisionError):
            checkpoint(fail, y)
        return y.exp().sin()

    output, handles = collected(outer, x)
    assert len(handles) == 1
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], x.detach().exp() * x.detach().exp().cos())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_are_not_collected(mode, block, x):
    """Rule 2: under no_grad and inference_mode a call leaves no handle."""
    with mode():
        _, handles = collected(block, x)
    assert handles == []


def test_calls_where_nothing_needs_a_gradient_are_not_collected(x):
    """Rule 2: where nothing needs a gradient, the call leaves no handle."""
    _, handles = collected(lambda y: y.sin().exp(), x.detach())
    assert handles == []


@pytest.mark.only("hooks", because="forward of the other engine records no graph")
def test_calls_whose_outputs_need_no_gradient_are_not_collected(x):
    """Rule 2: a call that backward cannot reach leaves no handle, so firing every handle is safe."""
    _alive, handles = collected(lambda y: y.sin().exp().detach(), x)
    assert handles == []


def test_calls_inside_function_transforms_are_not_collected(x):
    """Rule 2: under torch.func transforms the call is plain."""
    with recompute_handle_collector_ctx() as handles:
        torch.func.grad(lambda y: checkpoint(torch.sin, y).sum())(x.detach())
    assert handles == []


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_calls_made_by_a_replay_are_not_collected(block, x):
    """Rule 21: replays are never collected, nested calls inside them included."""
    output, in_forward = collected(lambda y: checkpoint(block, y).sin(), x)
    with recompute_handle_collector_ctx() as in_backward:
        torch.autograd.grad(output.sum(), x)
    assert (len(in_forward), in_backward) == (2, [])


def test_prefire_inside_a_collector_collects_nothing(block, x):
    """Rule 21: a prefire makes no handle."""
    _alive, handles = collected(block, x)
    with recompute_handle_collector_ctx() as more:
        recompute_handle(handles[0], "s")
    assert more == []


def test_other_threads_do_not_collect_here(block, x, start):
    """Rule 21: a collector belongs to the context that opened it."""
    with recompute_handle_collector_ctx() as handles:
        output = start(lambda: checkpoint(block, x)).result()
    assert (handles, output.requires_grad) == ([], True)


def test_every_collected_handle_can_be_fired_while_its_graph_lives(x):
    """Rule 2, rule 21: a call that saved nothing has nothing to replay, and firing its handle is no error."""
    output, handles = collected(lambda y: y + 1, x)
    for handle in handles:
        recompute_handle(handle, "s")
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], torch.ones_like(x))


@pytest.mark.only("hooks", because="handles of the other engine have phases")
def test_a_handle_tells_its_function_and_nothing_else(block, x):
    """Rule 21: a handle is opaque; it can be printed."""
    _, handles = collected(block, x)
    public = [name for name in dir(handles[0]) if not name.startswith("_")]
    assert (repr(handles[0]), public) == ("<handle of Block>", [])


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_calls_made_inside_a_scheduled_replay_are_not_collected(block, x):
    """Rule 15, rule 21: they belong to the replay, and die with it."""
    _alive, handles = collected(lambda y: checkpoint(block, y).sin(), x)
    with recompute_handle_collector_ctx() as more:
        recompute_handle(handles[0], "s")
    assert (len(handles), more) == (2, [])
    clear_recompute_session("s")
