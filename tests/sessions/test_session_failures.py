"""Exceptions anywhere: nothing half filled, nothing left bound, and the caller can go on."""

import pytest
import torch
import torch.utils.checkpoint

from regrow import (
    CheckpointError,
    InputChangedError,
    ReplayMismatchError,
    ValueChangedError,
    clear_recompute_session,
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


def fail_in_run(block, number, error=ZeroDivisionError):
    """Make one run of a block raise half-way."""

    def fail(runs):
        if runs == number:
            raise error

    block.halfway = fail


def read(output, targets, session_id="s", *, retain=True):
    with recompute_session_ctx(session_id, retain_on_unpack=retain):
        return torch.autograd.grad(output.sum(), targets, retain_graph=True)


def test_a_forward_that_raises_leaves_nothing_in_the_session(block, x, equal):
    """Rule 11: after a forward that raised, the session holds nothing and the context goes on."""
    fail_in_run(block, 1)
    with recompute_session_ctx("s", retain_on_unpack=True):
        with pytest.raises(ZeroDivisionError):
            checkpoint(block, x)
        held = block.held_bytes
        output = checkpoint(block, x)
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert held == 0
    assert equal(grads, block.gradients(x))
    assert block.runs == 3


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_prefire_that_raises_passes_the_error_on_and_holds_nothing(error, block, x):
    """Rule 11: what the function raises in a replay reaches the caller, and nothing is half filled."""
    output, handle = collected(block, x)
    fail_in_run(block, 2, error)
    with pytest.raises(error):
        recompute_handle(handle, "s")
    assert block.held_bytes == 0
    assert not is_recomputing()
    assert output.requires_grad


@pytest.mark.parametrize("next_id", ["s", "other"])
def test_after_a_failed_prefire_any_session_can_try(next_id, block, x, equal):
    """Rule 11: the call is free again, for the same id without a clear and for another."""
    output, handle = collected(block, x)
    fail_in_run(block, 2)
    with pytest.raises(ZeroDivisionError):
        recompute_handle(handle, "s")
    recompute_handle(handle, next_id)
    assert equal(read(output, [x, *block.weights], next_id), block.gradients(x))
    assert block.replays == 2


def test_a_failed_prefire_leaves_what_the_session_holds_of_others(make_block, x, equal):
    """Rule 11: the failure of one call's replay does not touch the session's other calls."""
    good, bad = make_block(seed=1), make_block(seed=2)
    output, handle = collected(good, x)
    _alive, bad_handle = collected(bad, x)
    recompute_handle(handle, "s")
    fail_in_run(bad, 2)
    with pytest.raises(ZeroDivisionError):
        recompute_handle(bad_handle, "s")
    assert equal(read(output, [x, *good.weights]), good.gradients(x))
    assert (good.replays, bad.held_bytes) == (1, 0)


def test_a_failed_prefire_of_a_call_made_in_the_session_leaves_it_there(block, x, equal):
    """Rule 8: a call that the session made stays its own after a failed prefire."""
    with recompute_session_ctx("s"):
        output, handle = collected(block, x)
    fail_in_run(block, 2)
    with pytest.raises(ZeroDivisionError):
        recompute_handle(handle, "s")
    with pytest.raises(CheckpointError, match="clear_recompute_session"):
        recompute_handle(handle, "other")
    assert equal(read(output, [x, *block.weights]), block.gradients(x))


def test_a_lazy_replay_that_raises_in_dx_leaves_nothing_and_can_be_repeated(block, x, equal):
    """Rule 11: after a failed lazy replay the same session may try again."""
    with recompute_session_ctx("s"):
        output = checkpoint(block, x)
    fail_in_run(block, 2)
    with pytest.raises(ZeroDivisionError):
        read(output, x)
    held = block.held_bytes
    grads = [*read(output, x), *read(output, block.weights)]
    assert held == 0
    assert equal(grads, block.gradients(x))
    assert block.replays == 2


def test_after_a_failed_lazy_replay_and_clear_another_session_serves(block, x, equal):
    """Rule 11: clear, then another session: it replays once."""
    with recompute_session_ctx("s"):
        output, handle = collected(block, x)
    fail_in_run(block, 2)
    with pytest.raises(ZeroDivisionError):
        read(output, x)
    clear_recompute_session("s")
    recompute_handle(handle, "other")
    assert equal(read(output, [x, *block.weights], "other"), block.gradients(x))
    assert block.replays == 2


def failing_hook(grad):
    raise ZeroDivisionError


def test_an_error_in_dx_keeps_what_the_session_holds(block, x, equal):
    """Rule 9: a pass that raises on its own account costs no further replay."""
    output, handle = collected(block, x)
    recompute_handle(handle, "s")
    hook = x.register_hook(failing_hook)
    with pytest.raises(ZeroDivisionError):
        read(output, x)
    hook.remove()
    assert equal(read(output, [x, *block.weights]), block.gradients(x))
    assert block.replays == 1


def test_an_error_in_dw_leaves_a_session_that_can_be_cleared(block, x, equal):
    """Rule 11: an error in the letting-go pass leaves the rest to clear; a plain backward works after it."""
    output, handle = collected(block, x)
    recompute_handle(handle, "s")
    read(output, x)
    hook = block.outer.register_hook(failing_hook)
    with pytest.raises(ZeroDivisionError):
        read(output, block.weights, retain=False)
    hook.remove()
    clear_recompute_session("s")
    held = block.held_bytes
    assert held == 0
    assert equal(torch.autograd.grad(output.sum(), [x, *block.weights]), block.gradients(x))


@pytest.mark.only("hooks", because="a session holds the graph of a reentrant replay as a whole")
def test_an_error_in_dw_can_be_followed_by_the_same_pass(block, x, equal):
    """Rule 11: dw may be tried again in the session; what was let go comes back."""
    output, handle = collected(block, x)
    recompute_handle(handle, "s")
    dx = read(output, x)
    hook = block.outer.register_hook(failing_hook)
    with pytest.raises(ZeroDivisionError):
        read(output, block.weights, retain=False)
    hook.remove()
    assert equal([*dx, *read(output, block.weights, retain=False)], block.gradients(x))
    assert block.replays == 2


def test_a_plain_backward_that_raises_keeps_nothing(block, x, equal):
    """Rule 6: what a backward brought back is released when it ends, also by an error."""
    output = checkpoint(block, x)
    hook = x.register_hook(failing_hook)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)
    hook.remove()
    held = block.held_bytes
    assert held == 0
    assert equal(torch.autograd.grad(output.sum(), [x, *block.weights]), block.gradients(x))


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
@pytest.mark.parametrize("lazily", [True, False])
def test_a_replay_that_differs_holds_nothing(lazily, block, x):
    """Rule 4, rule 11: a mismatch is raised before the session holds or gives anything."""

    def function(y):
        wave = y.sin()
        if is_recomputing():
            return wave.sum(0).exp().tanh()
        return block.remember(wave.exp()).tanh()

    with recompute_session_ctx("s"):
        output, handle = collected(function, x)
    with pytest.raises(ReplayMismatchError, match="function"):
        read(output, x) if lazily else recompute_handle(handle, "s")
    assert block.held_bytes == 0


def test_an_input_changed_before_the_prefire_is_refused(block, x):
    """Rule 4: an input changed in place since forward is an error that names it; the call stays free."""
    y = x.detach().clone()
    output, handle = collected(lambda a, scale: block(a * scale), x, scale=y)
    y.add_(1)
    with pytest.raises(InputChangedError, match="scale") as caught:
        recompute_handle(handle, "s")
    assert caught.value.names == ["scale"]
    assert (block.replays, output.requires_grad) == (0, True)


def grads_or_error(output, x):
    """What a session's backward gives: gradients, or the refusal that rule 4 allows."""
    try:
        return read(output, x)
    except CheckpointError:
        return None


def test_an_input_changed_after_the_prefire_gives_no_wrong_gradient(x):
    """Rule 4: a value that a session holds and that aliases a changed input is refused, or right."""
    scale = x.detach().clone()
    plain = torch.autograd.grad((x * scale).sin().sum(), x)
    output, handle = collected(lambda a, b: (a * b).sin(), x, scale)
    recompute_handle(handle, "s")
    scale.mul_(3)
    grads = grads_or_error(output, x)
    assert grads is None or torch.equal(grads[0], plain[0])


@pytest.mark.only("hooks", because="captured weights are no targets for the other engine")
def test_an_input_changed_between_two_passes_gives_no_wrong_gradient(x):
    """Rule 4: also between dx and dw of one session."""
    scale = x.detach().clone()
    weight = x.detach().clone().requires_grad_()
    plain = torch.autograd.grad((x * weight * scale).sin().sum(), weight)
    with recompute_session_ctx("s"):
        output = checkpoint(lambda a, b: (a * weight * b).sin(), x, scale)
    read(output, x)
    scale.mul_(3)
    grads = grads_or_error(output, weight)
    assert grads is None or torch.equal(grads[0], plain[0])


def test_a_parameter_changed_between_two_passes_gives_no_wrong_gradient(x):
    """Rule 1: plain autograd refuses a backward through a parameter that an optimizer changed; so does a session."""
    weight = x.detach().clone().requires_grad_()
    output, handle = collected(lambda a: (a * weight).sin(), x)
    plain = torch.autograd.grad((x * weight).sin().sum(), x)
    recompute_handle(handle, "s")
    with torch.no_grad():
        weight.mul_(3)
    try:
        grads = read(output, x)
    except RuntimeError:
        grads = None
    assert grads is None or torch.equal(grads[0], plain[0])


class WritesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        bump = y.exp()
        ctx.save_for_backward(bump)
        return bump.clone()

    @staticmethod
    def backward(ctx, grad):
        (bump,) = ctx.saved_tensors
        return bump.mul_(grad)


def test_a_backward_that_overwrites_what_it_read_gives_no_wrong_gradient_to_the_next_pass(x):
    """Rule 1: plain autograd refuses the second pass; in a session it is refused, or right."""
    plain = torch.autograd.grad((x.exp() * 2).sum(), x)
    with recompute_session_ctx("s"):
        output = checkpoint(lambda y: WritesWhatItSaved.apply(y) * 2, x)
    read(output, x)
    try:
        grads = read(output, x)
    except RuntimeError:
        grads = None
    assert grads is None or torch.equal(grads[0], plain[0])


def overwrites(y):
    wave = y.sin()
    bump = wave * wave
    wave.add_(1)
    return bump.exp() + wave


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_value_its_function_overwrites_is_refused_in_a_session(early_stop, x):
    """Rule 4: plain autograd refuses this backward; a session refuses it, too, in every pass."""
    output, handle = collected(overwrites, x, early_stop=early_stop)
    recompute_handle(handle, "s")
    for _ in range(2):
        with pytest.raises(ValueChangedError):
            read(output, x)


def test_a_value_its_function_overwrites_is_refused_beside_a_session(x):
    """Rule 4: a plain backward while a session holds values checks its own replay as well."""
    output, handle = collected(overwrites, x, early_stop=False)
    recompute_handle(handle, "s")
    with pytest.raises(ValueChangedError):
        torch.autograd.grad(output.sum(), x, retain_graph=True)
