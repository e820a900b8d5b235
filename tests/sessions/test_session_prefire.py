"""Prefire: the replay runs when the scheduler says so, and nothing of the caller's surroundings moves."""

import pytest
import torch

from regrow import (
    is_recomputing,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from tests.sessions.calls import checkpoint

pytestmark = pytest.mark.usefixtures("on_each_engine")


def collected(function, *args, **kwargs):
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(function, *args, **kwargs)
    return output, handles[0]


def grads_in_session(output, targets, session_id="s"):
    with recompute_session_ctx(session_id, retain_on_unpack=True):
        return torch.autograd.grad(output.sum(), targets)


def test_the_replay_runs_when_it_is_fired(block, x, equal):
    """Rule 9: prefire runs the function once more, backward in the session not at all."""
    output, handle = collected(block, x)
    block.timeline.append("prefire")
    recompute_handle(handle, "s")
    block.timeline.append("backward")
    grads = grads_in_session(output, [x, *block.weights])
    assert block.timeline == ["forward", "prefire", "replay", "backward"]
    assert equal(grads, block.gradients(x))


def test_a_second_prefire_does_nothing(block, x):
    """Rule 9: a second call for the same session is a no-op."""
    _alive, handle = collected(block, x)
    for _ in range(3):
        recompute_handle(handle, "s")
    assert block.replays == 1


def test_prefire_stands_inside_a_retaining_context(block, x, equal):
    """Rule 10: prefire may stand inside a retaining context of its session."""
    output, handle = collected(block, x)
    with recompute_session_ctx("s", retain_on_unpack=True):
        recompute_handle(handle, "s")
    assert equal(grads_in_session(output, [x, *block.weights]), block.gradients(x))
    assert block.replays == 1


def test_a_call_made_in_the_session_can_be_fired_in_the_same_context(block, x, equal):
    """Rule 8, rule 9: a call made in the context belongs to the session; prefire and backward share its replay."""
    with recompute_session_ctx("s", retain_on_unpack=True):
        output, handle = collected(block, x)
        recompute_handle(handle, "s")
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def test_frames_can_be_fired_in_any_order(make_block, x, equal):
    """Rule 9: the order of prefires does not matter."""
    blocks = [make_block(seed=seed) for seed in range(3)]

    def chain(call):
        output = x
        for block in blocks:
            output = call(block, output)
        return output

    targets = [x, *(weight for block in blocks for weight in block.weights)]
    plain = torch.autograd.grad(chain(lambda block, y: block(y)).sum(), targets)
    with recompute_handle_collector_ctx() as handles:
        output = chain(checkpoint)
    for handle in reversed(handles):
        recompute_handle(handle, "s")
    assert equal(grads_in_session(output, targets), plain)
    assert [block.runs for block in blocks] == [3, 3, 3]


def test_a_frame_can_be_fired_from_the_backward_of_the_next(make_block, x, equal):
    """Rule 9: a scheduler may fire a replay from a hook of a backward that runs."""
    first, second = make_block(seed=1), make_block(seed=2)
    plain = torch.autograd.grad(second(first(x)).sum(), x)
    with recompute_handle_collector_ctx() as handles:
        middle = checkpoint(first, x)
        output = checkpoint(second, middle)
    middle.register_hook(lambda grad: recompute_handle(handles[0], "s"))
    assert equal(grads_in_session(output, [x]), plain)
    assert (first.runs, second.runs) == (3, 3)


def test_a_frame_whose_output_was_dropped_cannot_be_fired(block, x):
    """Rule 12: a handle keeps no graph alive; firing it then is a RuntimeError that says so."""
    output, handle = collected(block, x)
    del output
    with pytest.raises(RuntimeError, match=r"Block.*died"):
        recompute_handle(handle, "s")


@pytest.mark.only(
    "hooks",
    because="a backward that used it up, or failed, releases a reentrant call",
)
def test_a_frame_that_backward_consumed_cannot_be_fired(block, x):
    """Rule 12: backward without retain_graph ends the call's graph."""
    output, handle = collected(block, x)
    output.sum().backward()
    with pytest.raises(RuntimeError, match=r"Block.*died"):
        recompute_handle(handle, "s")


def test_a_refused_dead_frame_leaves_the_id_free(block, x, equal):
    """Rule 8: firing a dead handle changes nothing; the id serves the next call."""
    dead, dead_handle = collected(block, x)
    del dead
    with pytest.raises(RuntimeError):
        recompute_handle(dead_handle, "s")
    output, handle = collected(block, x)
    recompute_handle(handle, "s")
    assert equal(grads_in_session(output, [x, *block.weights]), block.gradients(x))


@pytest.mark.parametrize("foreign", [None, "handle", 0, object()])
def test_what_is_no_handle_is_refused(foreign):
    """Rule 19: a foreign handle is a ValueError with the name, the value and what is allowed."""
    with pytest.raises(ValueError, match="handle must come from recompute_handle_collector_ctx") as caught:
        recompute_handle(foreign, "s")
    assert repr(foreign) in str(caught.value)


@pytest.mark.parametrize("bad_id", [None, [], {}, ("s", [])])
def test_an_id_that_cannot_be_named_again_is_refused(bad_id, block, x):
    """Rule 19: session_id None or unhashable is a ValueError before anything is done."""
    _alive, handle = collected(block, x)
    with pytest.raises(ValueError, match="session_id"):
        recompute_handle(handle, bad_id)
    assert block.replays == 0


def test_a_call_cannot_be_fired_before_its_forward_returned(x, equal):
    """Rule 19: inside its own forward a call cannot be replayed; it stays usable."""
    errors = []

    def function(y):
        wave = y.sin()
        if not is_recomputing():
            with pytest.raises(RuntimeError, match="forward has not returned") as caught:
                recompute_handle(handles[0], "s")
            errors.append(caught.value)
        return wave.exp()

    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(function, x)
    recompute_handle(handles[0], "other")
    assert equal(grads_in_session(output, [x], "other"), torch.autograd.grad(x.sin().exp().sum(), x))
    assert len(errors) == 1


def dropped(y, weight):
    return torch.nn.functional.dropout(y @ weight, 0.5).sin() @ weight


def test_prefire_draws_what_forward_drew_and_leaves_the_generator(x, equal):
    """Rule 3: the replay sees forward's random numbers, the caller's generator does not move."""
    weight = x.detach().clone().requires_grad_()
    torch.manual_seed(5)
    plain = torch.autograd.grad(dropped(x, weight).sum(), [x, weight])
    torch.manual_seed(5)
    output, handle = collected(dropped, x, weight)
    torch.manual_seed(99)
    torch.rand(3)
    before = torch.get_rng_state()
    recompute_handle(handle, "s")
    after = torch.get_rng_state()
    assert torch.equal(before, after)
    assert equal(grads_in_session(output, [x, weight]), plain)


def test_a_prefire_that_raises_leaves_the_generator(x):
    """Rule 3: the caller's state is the same also when the replay fails."""

    def function(y):
        noise = torch.rand_like(y)
        if is_recomputing():
            raise ZeroDivisionError
        return (y * noise).sin()

    output, handle = collected(function, x)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        recompute_handle(handle, "s")
    assert torch.equal(torch.get_rng_state(), before)
    assert output.requires_grad


@pytest.mark.only("hooks", because="captured weights are no targets for the other engine")
@pytest.mark.parametrize("around_prefire", [True, False])
@pytest.mark.parametrize("around_forward", [True, False])
def test_prefire_runs_under_forwards_autocast(around_forward, around_prefire, equal):
    """Rule 3: the replay sees forward's autocast state; the caller's is the same before and after."""
    y = torch.rand(4, 4).requires_grad_()
    weight = torch.rand(4, 4).requires_grad_()

    def function(tensor):
        return ((tensor @ weight).sin() @ weight).float()

    with torch.autocast("cpu", torch.bfloat16, enabled=around_forward):
        plain = function(y)
    expected = torch.autograd.grad(plain.sum(), [y, weight])
    with torch.autocast("cpu", torch.bfloat16, enabled=around_forward):
        output, handle = collected(function, y)
    with torch.autocast("cpu", torch.bfloat16, enabled=around_prefire):
        recompute_handle(handle, "s")
        left = torch.is_autocast_enabled("cpu")
    assert left is around_prefire
    assert equal(grads_in_session(output, [y, weight]), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_prefire_works_in_every_grad_mode_and_leaves_it(mode, block, x, equal):
    """Rule 3: gradients are enabled in the replay, wherever it is started; the mode is the caller's again after it."""
    output, handle = collected(block, x)
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        recompute_handle(handle, "s")
        after = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    assert before == after
    assert equal(grads_in_session(output, [x, *block.weights]), block.gradients(x))


def test_prefire_does_not_see_the_callers_default_device(x, equal):
    """Rule 3: function modes are those of forward, not of whoever fires."""

    def function(y):
        return (y * torch.full((4, 4), 2.0, dtype=torch.float64)).sin()

    output, handle = collected(function, x)
    with torch.device("meta"):
        recompute_handle(handle, "s")
        made = torch.ones(1)
    assert made.is_meta
    assert equal(grads_in_session(output, [x]), torch.autograd.grad(function(x).sum(), x))


def test_prefire_does_not_pass_through_the_callers_hooks(block, x):
    """Rule 3: saved-tensor hooks that surround the prefire are not forward's, and see nothing."""
    _alive, handle = collected(block, x)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(1) or tensor, lambda tensor: tensor):
        recompute_handle(handle, "s")
    assert seen == []


def test_a_call_under_save_on_cpu_can_be_fired(block, x, equal):
    """Rule 1: hooks that surround the call hold its inputs; a prefire brings them back."""
    with torch.autograd.graph.save_on_cpu():
        output, handle = collected(block, x)
    recompute_handle(handle, "s")
    assert equal(grads_in_session(output, [x, *block.weights]), block.gradients(x))
    assert block.replays == 1


def test_prefire_works_on_every_thread(anywhere, block, x, equal):
    """Rule 3: a replay may be fired from any thread."""
    output, handle = collected(block, x)
    anywhere(lambda: recompute_handle(handle, "s"))
    assert equal(grads_in_session(output, [x, *block.weights]), block.gradients(x))
    assert block.replays == 1


def test_the_function_can_tell_that_it_is_fired(x):
    """Rule 18: is_recomputing is True inside a prefire and False around it."""
    told = []

    def function(y):
        told.append(is_recomputing())
        return y.sin().exp()

    output, handle = collected(function, x)
    told.append("prefire")
    recompute_handle(handle, "s")
    told.append(is_recomputing())
    assert told == [False, "prefire", True, False]
    assert output.requires_grad
