"""Isolation: sessions do not see each other, and a call serves one of them at a time."""

import pytest
import torch
import torch.utils.checkpoint

from regrow import (
    CheckpointError,
    FrameBusyError,
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from tests.sessions.calls import checkpoint

pytestmark = pytest.mark.usefixtures("on_each_engine")


def fired(block, x, session_id):
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    recompute_handle(handles[0], session_id)
    return output, handles[0]


def test_a_prefire_for_another_id_is_refused(block, x, equal):
    """Rule 8: another session is refused, changes nothing, and leaves the first intact."""
    output, handle = fired(block, x, "first")
    with pytest.raises(FrameBusyError) as caught:
        recompute_handle(handle, "second")
    assert (caught.value.owner, caught.value.wanted, caught.value.label) == ("first", "second", "Block")
    assert block.held_bytes == block.held_when_filled
    with recompute_session_ctx("first"):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def test_the_refusal_is_an_error_of_torch_and_says_what_to_do(block, x):
    """Rule 8: the error is a CheckpointError, names both sessions and the call, and tells how to go on."""
    _alive, handle = fired(block, x, "first")
    with pytest.raises(torch.utils.checkpoint.CheckpointError) as caught:
        recompute_handle(handle, "second")
    assert isinstance(caught.value, CheckpointError)
    for part in ("Block", "'first'", "'second'", "Nothing was changed", "clear_recompute_session('first')"):
        assert part in str(caught.value)


def test_a_backward_in_the_context_of_another_id_is_refused(block, x, equal):
    """Rule 8: a context of another session does not read what the first one holds, nor replays over it."""
    output, _ = fired(block, x, "first")
    with pytest.raises(FrameBusyError) as caught, recompute_session_ctx("second", retain_on_unpack=True):
        torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)
    assert (caught.value.owner, caught.value.wanted) == ("first", "second")
    assert (block.replays, block.held_bytes) == (1, block.held_when_filled)
    with recompute_session_ctx("first"):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def test_a_call_made_in_a_context_is_refused_to_other_ids(block, x):
    """Rule 8: the call is bound from its creation, before any replay."""
    with recompute_session_ctx("first"), recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    with pytest.raises(FrameBusyError):
        recompute_handle(handles[0], "second")
    with pytest.raises(FrameBusyError), recompute_session_ctx("second"):
        torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert block.replays == 0


def test_a_refused_id_stays_usable(make_block, x, equal):
    """Rule 8: the session that was refused serves other calls."""
    busy, free = make_block(seed=1), make_block(seed=2)
    _alive, busy_handle = fired(busy, x, "first")
    output, _ = fired(free, x, "second")
    with pytest.raises(FrameBusyError):
        recompute_handle(busy_handle, "second")
    with recompute_session_ctx("second"):
        grads = torch.autograd.grad(output.sum(), [x, *free.weights])
    assert equal(grads, free.gradients(x))
    assert free.replays == 1


def test_after_clear_another_id_takes_the_call(block, x, equal):
    """Rule 8: clear frees the call for any session."""
    output, handle = fired(block, x, "first")
    clear_recompute_session("first")
    recompute_handle(handle, "second")
    with recompute_session_ctx("second"):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 2


def test_sessions_hold_their_calls_side_by_side(make_block, x, equal):
    """Rule 8: two sessions hold values at once, and clearing one leaves the other."""
    first, second = make_block(seed=1), make_block(seed=2)
    output, _ = fired(first, x, "first")
    other, _ = fired(second, x, "second")
    clear_recompute_session("first")
    held = first.held_bytes, second.held_bytes
    with recompute_session_ctx("second"):
        others = torch.autograd.grad(other.sum(), [x, *second.weights])
    assert held == (0, second.held_when_filled)
    assert equal(others, second.gradients(x))
    assert second.replays == 1
    assert equal(torch.autograd.grad(output.sum(), [x, *first.weights]), first.gradients(x))


def test_micro_batches_interleave(block, make_block, x, equal):
    """Rule 8: forwards, prefires, dx and dw of several micro-batches in one-forward-one-backward order."""
    batches = [x.detach().add(i).requires_grad_() for i in range(3)]
    blocks = [make_block() for _ in batches]
    outputs = [fired(blocks[i], batch, ("mb", i))[0] for i, batch in enumerate(batches)]
    grads = [[], [], []]
    for i in (1, 0, 2):
        with recompute_session_ctx(("mb", i), retain_on_unpack=True):
            grads[i] += torch.autograd.grad(outputs[i].sum(), batches[i], retain_graph=True)
    for i in (2, 0, 1):
        with recompute_session_ctx(("mb", i)):
            grads[i] += torch.autograd.grad(outputs[i].sum(), blocks[i].weights)
        clear_recompute_session(("mb", i))
    assert all(equal(grads[i], blocks[i].gradients(batch)) for i, batch in enumerate(batches))
    assert [block.replays for block in blocks] == [1, 1, 1]


def test_a_graph_may_pass_through_calls_of_a_session_and_plain_calls(make_block, x, equal):
    """Rule 9: in one backward, calls of the session share its replay, the others replay for themselves."""
    first, second, third = (make_block(seed=seed) for seed in range(3))
    plain = torch.autograd.grad(third(second(first(x))).sum(), [x, *first.weights, *third.weights])
    for block in (first, second, third):
        block.runs = 0
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(third, checkpoint(second, checkpoint(first, x)))
    recompute_handle(handles[1], "s")
    with recompute_session_ctx("s", retain_on_unpack=True):
        dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
        dw = torch.autograd.grad(output.sum(), [*first.weights, *third.weights])
    assert equal([*dx, *dw], plain)
    assert [block.replays for block in (first, second, third)] == [2, 1, 2]
