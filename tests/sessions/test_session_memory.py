"""Memory: what is held after each verb, freed by the last reference and by nothing else."""

import gc
import weakref
from collections import Counter
from contextlib import suppress

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from regrow import (
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from regrow._core import session as registry
from regrow._core.frame import frame_of
from tests.sessions.calls import checkpoint

pytestmark = pytest.mark.usefixtures("on_each_engine")

pytestmark = pytest.mark.usefixtures("no_collector")


def collected(function, *args, **kwargs):
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(function, *args, **kwargs)
    return output, handles[0]


def read(output, targets, *, retain, retain_graph=True, session_id="s"):
    with recompute_session_ctx(session_id, retain_on_unpack=retain):
        return torch.autograd.grad(output.sum(), targets, retain_graph=retain_graph)


def test_what_is_held_after_each_step_of_a_micro_batch(block, x):
    """Rule 11, rule 12: nothing after forward, everything from prefire through dx, nothing after a letting-go dw."""
    output, handle = collected(block, x)
    held = [block.held_bytes]
    recompute_handle(handle, "s")
    held.append(block.held_bytes)
    read(output, x, retain=True)
    held.append(block.held_bytes)
    read(output, block.weights, retain=False)
    held.append(block.held_bytes)
    assert held == [0, block.held_when_filled, block.held_when_filled, 0]


def test_a_lazy_session_holds_from_dx_to_clear(block, x):
    """Rule 11: retained values stay until clear, although no context is open."""
    with recompute_session_ctx("s"):
        output = checkpoint(block, x)
    held = [block.held_bytes]
    read(output, x, retain=True)
    held.append(block.held_bytes)
    clear_recompute_session("s")
    held.append(block.held_bytes)
    assert held == [0, block.held_when_filled, 0]


def test_values_go_one_by_one_as_they_are_read(block, x):
    """Rule 11: in a context that lets go, a value is free as soon as its reader is done, not at the end."""
    output, handle = collected(block, x)
    recompute_handle(handle, "s")
    held = []
    node = output.grad_fn
    while node is not None and node.next_functions:
        node.register_hook(lambda grads, _: held.append(block.held_bytes))
        node = node.next_functions[0][0]
    read(output, [x, *block.weights], retain=False)
    assert held == sorted(held, reverse=True)
    assert held[0] < block.held_when_filled
    assert held[-1] == 0


def test_a_plain_backward_holds_nothing_afterwards(block, x):
    """Rule 6: also with retain_graph, and also if only part of it was read."""
    output = checkpoint(block, x)
    held = [block.held_bytes]
    torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)
    held.append(block.held_bytes)
    torch.autograd.grad(output.sum(), block.outer, retain_graph=True)
    held.append(block.held_bytes)
    assert held == [0, 0, 0]


def test_a_graph_dropped_in_the_middle_of_a_session_is_freed_at_once(block, x):
    """Rule 12: a slot owns its value and is owned by its node; the open context keeps nothing of it."""
    with recompute_session_ctx("s", retain_on_unpack=True):
        output, handle = collected(block, x)
        recompute_handle(handle, "s")
        before = block.held_bytes
        del output
        after = block.held_bytes
    assert (before, after) == (block.held_when_filled, 0)


def test_a_node_that_backward_frees_frees_its_value(block, x):
    """Rule 12: in a retaining context, backward without retain_graph leaves nothing, while the output lives."""
    output, handle = collected(block, x)
    recompute_handle(handle, "s")
    read(output, [x, *block.weights], retain=True, retain_graph=False)
    assert output.shape == x.shape
    assert block.held_bytes == 0


def test_part_of_a_graph_that_dies_frees_its_part(make_block, x):
    """Rule 12: dropping one of two outputs frees what only its nodes held."""
    first, second = make_block(seed=1), make_block(seed=2)
    with recompute_handle_collector_ctx() as handles:
        outputs = list(checkpoint(lambda y: (first(y), second(y)), x))
    recompute_handle(handles[0], "s")
    outputs.pop()
    assert (first.held_bytes, second.held_bytes) == (first.held_when_filled, 0)


def test_a_frame_dies_with_its_graph(block, x):
    """Rule 12: handle, session and collector hold the frame weakly, and it is in no cycle."""
    output, handle = collected(block, x)
    recompute_handle(handle, "s")
    frame = weakref.ref(frame_of(handle))
    with recompute_session_ctx("s", retain_on_unpack=True):
        torch.autograd.grad(output.sum(), x, retain_graph=True)
        del output
        dead = frame() is None
    assert dead


def test_handles_keep_no_input_alive(block):
    """Rule 12: a scheduler may keep handles of finished micro-batches."""
    y = torch.rand(4, 4, dtype=torch.float64).requires_grad_()
    z = y * 2
    watched = weakref.ref(z)
    output, handle = collected(block, z)
    recompute_handle(handle, "s")
    del z, output
    assert watched() is None
    assert repr(handle) == "<handle of Block>"


def test_a_failed_replay_frees_what_it_had_brought_back(block, x):
    """Rule 11: as soon as the caller lets the exception go."""
    _alive, handle = collected(block, x)

    def fail(runs):
        if runs == 2:
            raise ZeroDivisionError

    block.halfway = fail
    with suppress(ZeroDivisionError):
        recompute_handle(handle, "s")
    assert block.held_bytes == 0


def test_a_failed_pass_frees_with_clear(block, x):
    """Rule 11: after an exception in dx, clear is enough."""
    output, handle = collected(block, x)
    recompute_handle(handle, "s")

    def fail(grad):
        raise ZeroDivisionError

    hook = x.register_hook(fail)
    with suppress(ZeroDivisionError):
        read(output, x, retain=True)
    hook.remove()
    clear_recompute_session("s")
    assert block.held_bytes == 0


def test_a_second_read_in_one_pass_keeps_nothing_beyond_the_session(block, x):
    """Rule 14: groups that read a value again make it stay until clear at the latest."""
    with recompute_session_ctx("s"):
        output = checkpoint(block, x)
    with recompute_session_ctx("s"):
        for target in [x, *block.weights]:
            torch.autograd.grad(output.sum(), target, retain_graph=True)
    clear_recompute_session("s")
    assert block.held_bytes == 0


def count_ours():
    """Objects of regrow's own types, and the names of sessions, that are alive."""
    kinds = [type(item) for item in gc.get_objects()]
    ours = Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("regrow"))
    return ours, len(registry._sessions)


def tidy_step(block, x, i):
    output, handle = collected(block, x)
    recompute_handle(handle, ("tidy", i))
    read(output, x, retain=True, session_id=("tidy", i))
    read(output, block.weights, retain=False, session_id=("tidy", i))
    clear_recompute_session(("tidy", i))


def lazy_step(block, x, i):
    with recompute_session_ctx(("lazy", i), retain_on_unpack=True):
        output = checkpoint(block, x)
        torch.autograd.grad(output.sum(), [x, *block.weights])
    clear_recompute_session(("lazy", i))


def forgetful_step(block, x, i):
    """The user never clears."""
    output, handle = collected(block, x)
    recompute_handle(handle, ("forgotten", i))
    read(output, x, retain=True, session_id=("forgotten", i))


def unread_step(block, x, i):
    """The user fires and drops."""
    _, handle = held = collected(block, x)
    recompute_handle(handle, ("unread", i))
    del held


def failing_step(block, x, i):
    """Every replay fails half-way."""
    output, handle = collected(block, x)

    def fail(runs):
        raise ZeroDivisionError

    block.halfway = fail
    with suppress(ZeroDivisionError):
        recompute_handle(handle, ("failing", i))
    with suppress(ZeroDivisionError):
        torch.autograd.grad(output.sum(), x)
    block.halfway = lambda runs: None


def refused_step(block, x, i):
    """Every id is refused."""
    output, handle = collected(block, x)
    recompute_handle(handle, ("owner", i))
    with suppress(RuntimeError):
        recompute_handle(handle, ("refused", i))
    clear_recompute_session(("owner", i))
    del output


def plain_step(block, x, i):
    torch.autograd.grad(checkpoint(block, x).sum(), [x, *block.weights])


@pytest.mark.parametrize(
    "step",
    [tidy_step, lazy_step, forgetful_step, unread_step, failing_step, refused_step, plain_step],
    ids=lambda step: step.__name__,
)
def test_nothing_grows_with_the_number_of_steps(step, block, x):
    """Rule 12: 200 steps with ids of their own leave as many objects and names as one step."""
    step(block, x, -1)
    plain_step(block, x, -1)
    before = count_ours()
    for i in range(200):
        step(block, x, i)
    plain_step(block, x, 0)
    assert count_ours() == before
    assert block.held_bytes == 0


def allocated_bytes(work):
    """What is left of the bytes that work allocated on the CPU, by the profiler's allocation events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = recorded.profiler.kineto_results.experimental_event_tree()
    total = 0
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            total += event.extra_fields.alloc_size
    return total


def test_the_allocator_sees_what_a_session_holds_and_that_clear_frees_it(block, x):
    """Rule 11: the bytes a prefire leaves are the session's, and after clear the balance is even."""
    output, handle = collected(block, x)
    fired = allocated_bytes(lambda: recompute_handle(handle, "s"))
    cleared = allocated_bytes(lambda: clear_recompute_session("s"))
    assert (fired, cleared) == (block.held_when_filled, -block.held_when_filled)
    assert output.shape == x.shape


def test_a_session_holds_no_more_than_plain_autograd_would(x, make_block):
    """Rule 12: prefired, a frame holds the bytes that the plain graph holds from its forward on."""
    plain, regrown = make_block(), make_block()
    outputs = [plain(x)]
    output, handle = collected(regrown, x)
    recompute_handle(handle, "s")
    assert regrown.held_bytes == plain.held_bytes
    assert outputs[0].shape == output.shape
