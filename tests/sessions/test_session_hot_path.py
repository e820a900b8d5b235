"""The hot path: a read of a filled slot takes no lock, reads no context variable and calls nothing."""

import contextvars
import sys

import pytest
import torch

from regrow import (
    checkpoint,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from regrow._core import session as registry
from regrow._core.frame import frame_of


def fired(block, x, session_id="s"):
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    recompute_handle(handles[0], session_id)
    return output, handles[0]


@pytest.mark.parametrize("retain", [True, False])
def test_backward_reads_filled_slots_while_every_lock_is_held_elsewhere(retain, block, x, start, equal):
    """Rule 7: unpacking a filled slot takes neither the control lock nor the lock of the call."""
    output, handle = fired(block, x)
    loss = output.sum()
    with recompute_session_ctx("s", retain_on_unpack=retain), registry._control, frame_of(handle).lock:
        grads = start(lambda: torch.autograd.grad(loss, [x, *block.weights])).result()
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def test_backward_reads_filled_slots_in_an_empty_context(block, x, equal):
    """Rule 7: what backward needs to know is on the call, not in a context variable."""
    output, _ = fired(block, x)
    loss = output.sum()
    with recompute_session_ctx("s", retain_on_unpack=True):
        grads = contextvars.Context().run(lambda: torch.autograd.grad(loss, [x, *block.weights]))
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def calls_of_unpack(work):
    """Everything that functions of regrow's unpack module call while work runs."""
    called = []

    def is_unpack(frame):
        return frame is not None and frame.f_globals.get("__name__") == "regrow._engines.hooks.unpack"

    def watch(frame, event, arg):
        if event == "c_call" and is_unpack(frame):
            called.append(arg.__name__)
        if event == "call" and is_unpack(frame.f_back):
            called.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize("retain", [True, False])
def test_a_read_of_a_filled_slot_calls_nothing(retain, block, x):
    """Rule 7: field reads only."""
    output, _ = fired(block, x)
    loss = output.sum()
    with recompute_session_ctx("s", retain_on_unpack=retain):
        called = calls_of_unpack(lambda: torch.autograd.grad(loss, [x, *block.weights]))
    assert (called, block.replays) == ([], 1)


def test_a_plain_read_of_a_filled_slot_asks_only_which_backward_runs(block, x):
    """Rule 7: outside sessions the one call is that for the running graph task, once the first read has replayed."""
    loss = checkpoint(block, x).sum()
    called = calls_of_unpack(lambda: torch.autograd.grad(loss, [x, *block.weights]))
    while_reading = called[: called.index("_release")] if "_release" in called else called
    assert while_reading[-2:] == ["_current_graph_task_id"] * 2


def test_a_session_that_was_filled_beside_a_plain_backward_is_read_by_fields(block, x, equal):
    """Rule 7: also if its slots were filled while a plain backward held values of its own."""
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    loss = output.sum()
    # Runs when the plain backward has read the last layer and not yet the first.
    hook = output.grad_fn.next_functions[0][0].register_prehook(lambda grads: recompute_handle(handles[0], "s"))
    torch.autograd.grad(loss, x, retain_graph=True)
    hook.remove()
    grads = []
    with recompute_session_ctx("s", retain_on_unpack=True):
        called = calls_of_unpack(lambda: grads.extend(torch.autograd.grad(loss, [x, *block.weights])))
    assert equal(grads, block.gradients(x))
    assert called == []
