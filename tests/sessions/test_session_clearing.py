"""Clear: everything a session holds has an end, and a later backward works."""

import pytest
import torch

from regrow import (
    CheckpointError,
    clear_recompute_session,
    is_recomputing,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from tests.sessions.calls import checkpoint

pytestmark = pytest.mark.usefixtures("on_each_engine")


def fired(block, x, session_id="s"):
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    recompute_handle(handles[0], session_id)
    return output, handles[0]


def test_clear_frees_what_was_not_read(block, x):
    """Rule 11: clear frees a session that no backward has read."""
    _alive, _ = fired(block, x)
    before = block.held_bytes
    clear_recompute_session("s")
    assert (before, block.held_bytes) == (block.held_when_filled, 0)


@pytest.mark.only("hooks", because="a session holds the graph of a reentrant replay as a whole")
def test_clear_frees_what_was_partly_read(make_block, x):
    """Rule 11: clear frees a session of which a pass has read some and let it go."""
    first, second = make_block(seed=1), make_block(seed=2)
    with recompute_session_ctx("s"):
        middle = checkpoint(first, x)
        output = checkpoint(second, middle)
        torch.autograd.grad(output.sum(), second.outer, retain_graph=True)
    before = second.held_bytes
    clear_recompute_session("s")
    assert 0 < before < second.held_when_filled
    assert (first.held_bytes, second.held_bytes) == (0, 0)


def test_clear_may_be_repeated(block, x, equal):
    """Rule 11: clear again does nothing."""
    output, _ = fired(block, x)
    for _ in range(3):
        clear_recompute_session("s")
    assert equal(torch.autograd.grad(output.sum(), [x, *block.weights]), block.gradients(x))


def test_clear_of_an_unknown_id_does_nothing(block, x):
    """Rule 11: clear of an id that was never used touches no session."""
    _alive, _ = fired(block, x)
    clear_recompute_session("unknown")
    clear_recompute_session(("s", 1))
    assert block.held_bytes == block.held_when_filled


@pytest.mark.parametrize("bad_id", [None, [], {}])
def test_clear_refuses_an_id_that_cannot_be_named(bad_id):
    """Rule 19: clear takes the same ids as a context."""
    with pytest.raises(ValueError, match="session_id"):
        clear_recompute_session(bad_id)


@pytest.mark.parametrize("passes_before", [0, 1, 2])
def test_a_plain_backward_after_clear_replays_for_itself(passes_before, block, x, equal):
    """Rule 11: after clear, read or not, a later plain backward of the same graph works."""
    output, _ = fired(block, x)
    with recompute_session_ctx("s", retain_on_unpack=True):
        for _ in range(passes_before):
            torch.autograd.grad(output.sum(), x, retain_graph=True)
    clear_recompute_session("s")
    assert equal(torch.autograd.grad(output.sum(), [x, *block.weights]), block.gradients(x))
    assert block.replays == 2


def test_clear_inside_an_open_context_makes_its_calls_plain(block, x, equal):
    """Rule 8: after clear a call belongs to no session, also while the context is still open."""
    with recompute_session_ctx("s", retain_on_unpack=True):
        output = checkpoint(block, x)
        clear_recompute_session("s")
        dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
        held_between = block.held_bytes
        dw = torch.autograd.grad(output.sum(), block.weights)
    assert equal([*dx, *dw], block.gradients(x))
    assert (block.replays, held_between) == (2, 0)


def test_a_call_can_be_fired_again_after_clear(block, x, equal):
    """Rule 8: after clear the same id may take the call again, with a replay of its own."""
    output, handle = fired(block, x)
    clear_recompute_session("s")
    recompute_handle(handle, "s")
    with recompute_session_ctx("s"):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 2


def test_iterations_may_use_an_id_again(make_block, x, equal):
    """Rule 8: repeated iterations reuse an id after clear."""
    for seed in range(3):
        block = make_block(seed=seed)
        output, _ = fired(block, x, "micro batch 0")
        with recompute_session_ctx("micro batch 0", retain_on_unpack=True):
            dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
        with recompute_session_ctx("micro batch 0"):
            dw = torch.autograd.grad(output.sum(), block.weights)
        clear_recompute_session("micro batch 0")
        assert equal([*dx, *dw], block.gradients(x))
        assert block.replays == 1


def test_an_id_may_be_used_for_the_next_graph_before_clear(make_block, x, equal):
    """Rule 8: one session may hold the calls of several graphs; clear frees them all."""
    first, second = make_block(seed=1), make_block(seed=2)
    output, _ = fired(first, x)
    other, _ = fired(second, x)
    with recompute_session_ctx("s", retain_on_unpack=True):
        grads = torch.autograd.grad(output.sum(), [x, *first.weights], retain_graph=True)
        others = torch.autograd.grad(other.sum(), [x, *second.weights], retain_graph=True)
    clear_recompute_session("s")
    assert equal([*grads, *others], [*first.gradients(x), *second.gradients(x)])
    assert (first.held_bytes, second.held_bytes) == (0, 0)


def test_equal_ids_name_one_session(block, x, equal):
    """Rule 10: ids are compared by value, so the caller can name a session again."""
    output, _ = fired(block, x, ("micro_batch", 3))
    with recompute_session_ctx(("micro_batch", 1 + 2)):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def test_a_function_that_clears_its_session_while_it_is_fired_leaves_nothing(block, x, equal):
    """Rule 11: a session that is cleared while a prefire runs holds nothing when it ends."""

    def clear(runs):
        if runs == 2:
            clear_recompute_session("s")

    block.halfway = clear
    output, _ = fired(block, x)
    held = block.held_bytes
    assert held == 0
    assert equal(torch.autograd.grad(output.sum(), [x, *block.weights]), block.gradients(x))


def test_a_function_that_clears_its_session_and_raises_leaves_nothing(block, x):
    """Rule 11: cleared and failed at once, a replay leaves nothing behind either."""

    def function(y):
        wave = block.remember(y.sin())
        if is_recomputing():
            clear_recompute_session("s")
        bump = block.remember(wave.cos().exp())
        if is_recomputing():
            raise ZeroDivisionError
        return bump.tanh()

    with recompute_handle_collector_ctx() as handles:
        _alive = checkpoint(function, x)
    with pytest.raises(ZeroDivisionError):
        recompute_handle(handles[0], "s")
    assert block.held_bytes == 0


def test_a_session_cleared_while_its_lazy_replay_runs_still_gives_the_right_gradients(block, x, equal):
    """Rule 11: the backward that asked for the replay is not the one to suffer from a clear."""

    def clear(runs):
        if runs == 2:
            clear_recompute_session("s")

    block.halfway = clear
    with recompute_session_ctx("s", retain_on_unpack=True):
        output = checkpoint(block, x)
        grads = torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)
    assert equal(grads, block.gradients(x))
    assert block.held_bytes == 0


def test_a_session_cleared_after_the_wanted_value_is_back_still_gives_it(x):
    """Rule 11: also if the clear comes between the value's return and the end of its replay."""

    def heads(y):
        first = y.sin().exp()
        if is_recomputing():
            clear_recompute_session("s")
        return first, y.cos().tanh()

    with recompute_session_ctx("s", retain_on_unpack=True):
        first, _alive = checkpoint(heads, x)
        grads = torch.autograd.grad(first.sum(), x)
    assert torch.equal(grads[0], torch.autograd.grad(x.sin().exp().sum(), x)[0])


@pytest.mark.only(
    "hooks",
    because="a backward that used it up, or failed, releases a reentrant call",
)
def test_a_failed_pass_can_be_cleared_and_done_plainly(block, x, equal):
    """Rule 11: after an exception in a pass, clear and a plain backward work."""
    output, handle = fired(block, x)

    def fail(grad):
        raise ZeroDivisionError

    hook = x.register_hook(fail)
    with pytest.raises(ZeroDivisionError), recompute_session_ctx("s", retain_on_unpack=True):
        torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)
    hook.remove()
    clear_recompute_session("s")
    assert block.held_bytes == 0
    assert equal(torch.autograd.grad(output.sum(), [x, *block.weights]), block.gradients(x))
    with pytest.raises(RuntimeError, match="died"):
        recompute_handle(handle, "s")


@pytest.mark.only("hooks", because="the other engine has no selective checkpointing")
def test_selective_values_are_freed_by_clear(block, x, equal):
    """Rule 11, rule 16: what a policy kept is freed with the session; a later backward runs everything again."""

    def keep_waves(ctx, op, *args, **kwargs):
        return op is torch.ops.aten.sin.default

    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x, policy_fn=keep_waves)
    kept = block.held_bytes
    recompute_handle(handles[0], "s")
    clear_recompute_session("s")
    after = block.held_bytes
    assert equal(torch.autograd.grad(output.sum(), [x, *block.weights]), block.gradients(x))
    assert (kept, after) == (4 * 4 * 8, 0)


@pytest.mark.only("hooks", because="the other engine has no selective checkpointing")
def test_selective_values_that_no_replay_has_read_are_freed_by_clear(block, x):
    """Rule 11, rule 16: clear frees what a policy kept also before the first replay."""

    def keep_waves(ctx, op, *args, **kwargs):
        return op is torch.ops.aten.sin.default

    with recompute_session_ctx("s"):
        _alive = checkpoint(block, x, policy_fn=keep_waves)
    clear_recompute_session("s")
    assert block.held_bytes == 0


def noisy(y, weight):
    noise = torch.rand_like(y)
    return torch.dropout((y @ weight * noise).sin(), 0.5, True) @ weight


@pytest.mark.only("hooks", because="the other engine has no selective checkpointing")
@pytest.mark.parametrize("cleared", [True, False])
def test_selective_values_serve_every_pass_and_clear_costs_only_time(cleared, x, equal):
    """Rule 16: kept random operators leave the generator as forward did, in a session and after its clear."""

    def keep_noise_and_products(ctx, op, *args, **kwargs):
        return op in (torch.ops.aten.rand_like.default, torch.ops.aten.mm.default)

    weight = x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    plain = torch.autograd.grad(noisy(x, weight).sum(), [x, weight])
    torch.manual_seed(3)
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(noisy, x, weight, policy_fn=keep_noise_and_products)
    torch.manual_seed(4)
    recompute_handle(handles[0], "s")
    if cleared:
        clear_recompute_session("s")
    with recompute_session_ctx("s", retain_on_unpack=True):
        dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
        dw = torch.autograd.grad(output.sum(), weight)
    assert equal([*dx, *dw], plain)


def test_an_error_class_says_that_it_is_torchs_too():
    """Rule 4: code written for torch keeps catching what regrow raises."""
    assert issubclass(CheckpointError, torch.utils.checkpoint.CheckpointError)
