"""Threads: backward finds its session on any of them, and no two of them wait for each other."""

import asyncio
import gc
import threading

import pytest
import torch

from regrow import (
    FrameBusyError,
    clear_recompute_session,
    is_recomputing,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from regrow._core import session as registry
from regrow._core.frame import frame_of
from tests.sessions.calls import checkpoint

pytestmark = pytest.mark.usefixtures("on_each_engine")


def collected(function, *args):
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(function, *args)
    return output, handles[0]


class Gate:
    """Stops one run of a block half-way until it is opened."""

    def __init__(self, block, wait, *, run=2):
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._wait = wait
        self._run = run
        block.halfway = self._stop

    def _stop(self, runs):
        if runs == self._run:
            self.reached.set()
            self._wait(self.opened)


@pytest.mark.parametrize("prefired", [True, False])
def test_dx_and_dw_share_one_replay_on_every_thread(prefired, anywhere, block, x, equal):
    """Rule 7, rule 9: backward finds its session on threads that see none of the caller's context variables."""
    with recompute_session_ctx("s"):
        output, handle = collected(block, x)
    if prefired:
        recompute_handle(handle, "s")
    loss = output.sum()
    with recompute_session_ctx("s", retain_on_unpack=True):
        dx = anywhere(lambda: torch.autograd.grad(loss, x, retain_graph=True))
    with recompute_session_ctx("s"):
        dw = anywhere(lambda: torch.autograd.grad(loss, block.weights))
    assert equal([*dx, *dw], block.gradients(x))
    assert block.replays == 1


def test_a_plain_backward_is_right_on_every_thread(anywhere, block, x, equal):
    """Rule 1: outside sessions, too."""
    loss = checkpoint(block, x).sum()
    grads = anywhere(lambda: torch.autograd.grad(loss, [x, *block.weights]))
    assert equal(grads, block.gradients(x))
    assert (block.replays, block.held_bytes) == (1, 0)


def test_each_verb_may_be_called_on_a_thread_of_its_own(block, x, start, equal):
    """Rule 13: forward, prefire, context with backward, and clear each on another thread."""
    output, handle = start(lambda: collected(block, x)).result()
    start(lambda: recompute_handle(handle, "s")).result()

    def backward():
        with recompute_session_ctx("s", retain_on_unpack=True):
            return torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)

    grads = start(backward).result()
    held = block.held_bytes
    start(lambda: clear_recompute_session("s")).result()
    assert equal(grads, block.gradients(x))
    assert (held, block.held_bytes, block.replays) == (block.held_when_filled, 0, 1)


def test_a_context_is_seen_by_its_own_thread_only(block, x, start):
    """Rule 10: another thread may open a context of another id, and its calls belong to that one."""

    def elsewhere():
        with recompute_session_ctx("theirs"):
            return collected(block, x)

    with recompute_session_ctx("ours"):
        _alive, handle = start(elsewhere).result()
    with pytest.raises(FrameBusyError) as caught:
        recompute_handle(handle, "ours")
    assert caught.value.owner == "theirs"


@pytest.mark.only("hooks", because="two backwards of the other engine share its replay or not, as they come")
def test_two_backwards_of_one_frame_at_once_are_both_right(block, x, start, wait, equal):
    """Rule 6: each backward call has a replay of its own; the second waits for the first one's to end."""
    output = checkpoint(block, x)
    gate = Gate(block, wait)
    entered = threading.Event()

    def backward(mark=None):
        if mark is not None:
            mark.set()
        return torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)

    first = start(backward)
    wait(gate.reached)
    second = start(lambda: backward(entered))
    wait(entered)
    gate.opened.set()
    grads = first.result(), second.result()
    assert all(equal(each, block.gradients(x)) for each in grads)
    assert (block.replays, block.held_bytes) == (2, 0)


@pytest.mark.only("hooks", because="forward of the other engine records no graph")
def test_a_backward_inside_a_backward_of_the_same_frame_is_right(block, x, equal):
    """Rule 6: two backwards of one frame overlap on one thread; neither takes the other's values."""
    output = checkpoint(block, x)
    loss = output.sum()
    inner = []

    def nest(grads):
        if not inner:
            inner.append(None)
            inner[:] = torch.autograd.grad(loss, [x, *block.weights], retain_graph=True)

    # Runs when the outer backward has read the last layer and not yet the first.
    output.grad_fn.next_functions[0][0].register_prehook(nest)
    outer = torch.autograd.grad(loss, [x, *block.weights], retain_graph=True)
    assert equal(inner, block.gradients(x))
    assert equal(outer, block.gradients(x))
    assert (block.replays, block.held_bytes) == (2, 0)


def test_two_threads_of_one_session_share_one_lazy_replay(block, x, start, wait, equal):
    """Rule 9: the thread that comes second waits for the replay and reads it."""
    with recompute_session_ctx("s", retain_on_unpack=True):
        output = checkpoint(block, x)
        gate = Gate(block, wait)
        entered = threading.Event()

        def backward(targets, mark=None):
            if mark is not None:
                mark.set()
            return torch.autograd.grad(output.sum(), targets, retain_graph=True)

        dx = start(lambda: backward(x))
        wait(gate.reached)
        dw = start(lambda: backward(block.weights, entered))
        wait(entered)
        gate.opened.set()
        grads = [*dx.result(), *dw.result()]
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def test_a_prefire_while_another_runs_shares_its_replay(block, x, start, wait, equal):
    """Rule 9: prefires of one session from two threads run the function once."""
    output, handle = collected(block, x)
    gate = Gate(block, wait)
    entered = threading.Event()

    def fire(mark=None):
        if mark is not None:
            mark.set()
        recompute_handle(handle, "s")

    first = start(fire)
    wait(gate.reached)
    second = start(lambda: fire(entered))
    wait(entered)
    gate.opened.set()
    first.result()
    second.result()
    with recompute_session_ctx("s"):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def test_a_prefire_during_a_backward_on_another_thread_disturbs_nothing(block, x, start, wait, equal):
    """Rule 9: the plain backward keeps its own values, the session gets its own."""
    output, handle = collected(block, x)
    gate = Gate(block, wait)
    backward = start(lambda: torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True))
    wait(gate.reached)
    fire = start(lambda: recompute_handle(handle, "s"))
    gate.opened.set()
    plain = backward.result()
    fire.result()
    with recompute_session_ctx("s", retain_on_unpack=True):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(plain, block.gradients(x))
    assert equal(grads, block.gradients(x))
    assert block.replays == 2


def test_a_session_cleared_while_another_thread_fires_holds_nothing(block, x, start, wait, equal):
    """Rule 11, rule 13: clear does not wait for the replay; when the replay ends, nothing is held."""
    output, handle = collected(block, x)
    gate = Gate(block, wait)
    fire = start(lambda: recompute_handle(handle, "s"))
    wait(gate.reached)
    clear_recompute_session("s")
    gate.opened.set()
    fire.result()
    held = block.held_bytes
    assert held == 0
    assert equal(torch.autograd.grad(output.sum(), [x, *block.weights]), block.gradients(x))


def test_a_session_cleared_while_another_thread_replays_lazily_gives_that_thread_its_gradients(
    block, x, start, wait, equal
):
    """Rule 11: the backward that waits for its replay gets its values, and the session holds nothing."""
    gate = Gate(block, wait)

    def step():
        with recompute_session_ctx("s", retain_on_unpack=True):
            output = checkpoint(block, x)
            return output, torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)

    work = start(step)
    wait(gate.reached)
    clear_recompute_session("s")
    gate.opened.set()
    _alive, grads = work.result()
    assert equal(grads, block.gradients(x))
    assert block.held_bytes == 0


def test_after_a_clear_during_a_replay_another_session_takes_the_call(block, x, start, wait, equal):
    """Rule 8: clear frees the call at once; the next session's replay starts when the running one has ended."""
    output, handle = collected(block, x)
    gate = Gate(block, wait)
    old = start(lambda: recompute_handle(handle, "old"))
    wait(gate.reached)
    clear_recompute_session("old")
    new = start(lambda: recompute_handle(handle, "new"))
    gate.opened.set()
    old.result()
    new.result()
    held = block.held_bytes
    with recompute_session_ctx("new"):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert held == block.held_when_filled
    assert equal(grads, block.gradients(x))
    assert block.replays == 2


class TellsWhoWaits:
    """A lock that tells when a second thread comes to it."""

    def __init__(self, lock):
        self.contended = threading.Event()
        self._lock = lock
        self._first = None

    def __enter__(self):
        if self._first is None:
            self._first = threading.get_ident()
        elif self._first != threading.get_ident():
            self.contended.set()
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


def test_a_prefire_that_fails_while_another_waits_leaves_that_one_its_session(block, x, start, wait, equal):
    """Rule 11: the second prefire of the session replays, and its values are read and cleared like any."""
    output, handle = collected(block, x)
    gate = Gate(block, wait)
    stop = block.halfway

    def fail_once(runs):
        stop(runs)
        if runs == 2:
            raise ZeroDivisionError

    block.halfway = fail_once
    lock = frame_of(handle).lock = TellsWhoWaits(frame_of(handle).lock)
    first = start(lambda: recompute_handle(handle, "s"))
    wait(gate.reached)
    second = start(lambda: recompute_handle(handle, "s"))
    wait(lock.contended)
    gate.opened.set()
    with pytest.raises(ZeroDivisionError):
        first.result()
    del first
    gc.collect()  # the error's own traceback holds what the function had made when it raised
    second.result()
    with recompute_session_ctx("s", retain_on_unpack=True):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)
    clear_recompute_session("s")
    assert equal(grads, block.gradients(x))
    assert (block.replays, block.held_bytes) == (2, 0)


def test_a_session_that_is_cleared_before_its_prefire_begins_can_be_cleared_again(block, x, start, wait):
    """Rule 11: whatever a prefire brings back that lost a race with clear, the next clear frees it."""
    _alive, handle = collected(block, x)
    lock = frame_of(handle).lock = TellsWhoWaits(frame_of(handle).lock)
    with lock:
        fire = start(lambda: recompute_handle(handle, "s"))
        wait(lock.contended)
        clear_recompute_session("s")
    fire.result()
    clear_recompute_session("s")
    assert block.held_bytes == 0


def test_a_graph_dropped_while_its_replay_runs_is_freed_when_that_ends(block, x, start, wait):
    """Rule 12: a replay that outlives its graph keeps nothing of it."""
    alive = list(collected(block, x))
    handle = alive.pop()
    gate = Gate(block, wait)
    fire = start(lambda: recompute_handle(handle, "s"))
    wait(gate.reached)
    alive.clear()
    gate.opened.set()
    fire.result()
    with pytest.raises(RuntimeError, match="died"):
        recompute_handle(handle, "s")
    assert block.held_bytes == 0


class Name:
    """An id that looks, whenever it is printed, whether the control lock can be taken."""

    def __init__(self, start):
        self.free = []
        self._start = start

    def __repr__(self):
        free = self._start(lambda: registry._control.acquire(blocking=False) and not registry._control.release())
        self.free.append(free.result())
        return "a name"


def test_a_refusal_is_written_without_the_control_lock(block, x, start):
    """Rule 13: the control lock covers no code of the user, and the repr of an id is such code."""
    _alive, handle = collected(block, x)
    name = Name(start)
    recompute_handle(handle, name)
    with pytest.raises(FrameBusyError, match="a name"):
        recompute_handle(handle, "other")
    assert name.free
    assert all(name.free)


def force(y, weight):
    """The function takes a gradient of its own, and saves what that gradient depends on."""
    energy = (y.sin() * weight).exp().sum()
    (gradient,) = torch.autograd.grad(energy, y, create_graph=True)
    return gradient * weight


@pytest.mark.only("hooks", because="forward of the other engine records no graph")
@pytest.mark.parametrize("depth", [58, 59, 60, 61])
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_gradient_inside_the_function_may_run_on_an_engine_thread(depth, early_stop, at_depth, x, equal):
    """Rule 1, rule 5: what the function saves from another thread, as on accelerators, ends no replay there."""
    weight = x.detach().clone().requires_grad_()
    plain = torch.autograd.grad(force(x, weight).sum(), [x, weight])

    def work():
        with torch.enable_grad():
            loss = checkpoint(force, x, weight, early_stop=early_stop).sum()
        return torch.autograd.grad(loss, [x, weight])

    assert equal(at_depth(depth, work), plain)


def test_sessions_of_asyncio_tasks_do_not_mix(make_block, x, equal):
    """Rule 10: a context belongs to the task that opened it, although all tasks share a thread."""
    blocks = [make_block(seed=seed) for seed in range(2)]

    async def step(i, here, there):
        with recompute_session_ctx(("task", i), retain_on_unpack=True):
            output = checkpoint(blocks[i], x)
            here.set()
            await there.wait()
            dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
            await asyncio.sleep(0)
            dw = torch.autograd.grad(output.sum(), blocks[i].weights)
        clear_recompute_session(("task", i))
        return [*dx, *dw]

    async def both():
        first, second = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(step(0, first, second), step(1, second, first))

    grads = asyncio.run(both())
    assert all(equal(grads[i], blocks[i].gradients(x)) for i in range(2))
    assert [block.replays for block in blocks] == [1, 1]


def test_two_sessions_work_on_two_threads_at_once(make_block, x, start, wait, equal):
    """Rule 8: two sessions on two frames replay at the same time, and neither sees the other."""
    blocks = [make_block(seed=seed) for seed in range(2)]
    inputs = [x.detach().add(i).requires_grad_() for i in range(2)]
    both_inside = [Gate(block, wait) for block in blocks]

    def step(i):
        with recompute_session_ctx(("mb", i), retain_on_unpack=True):
            output = checkpoint(blocks[i], inputs[i])
            dx = torch.autograd.grad(output.sum(), inputs[i], retain_graph=True)
            dw = torch.autograd.grad(output.sum(), blocks[i].weights)
        clear_recompute_session(("mb", i))
        return [*dx, *dw]

    work = [start(lambda i=i: step(i)) for i in range(2)]
    for gate in both_inside:
        wait(gate.reached)
    for gate in both_inside:
        gate.opened.set()
    grads = [each.result() for each in work]
    assert all(equal(grads[i], blocks[i].gradients(inputs[i])) for i in range(2))
    assert [block.replays for block in blocks] == [1, 1]


def test_the_control_plane_is_free_while_a_replay_runs(make_block, x, start, wait, equal):
    """Rule 13: no replay runs under the control lock: binding, opening and clearing go on beside it."""
    slow, quick = make_block(seed=1), make_block(seed=2)
    _alive, slow_handle = collected(slow, x)
    gate = Gate(slow, wait)
    fire = start(lambda: recompute_handle(slow_handle, "slow"))
    wait(gate.reached)

    def step():
        output, handle = collected(quick, x)
        recompute_handle(handle, "quick")
        with recompute_session_ctx("quick"):
            grads = torch.autograd.grad(output.sum(), [x, *quick.weights])
        clear_recompute_session("quick")
        with recompute_session_ctx("slow"):
            pass
        return grads

    grads = start(step).result()
    gate.opened.set()
    fire.result()
    assert equal(grads, quick.gradients(x))


def test_a_busy_frame_is_refused_at_once_while_its_replay_runs(block, x, start, wait):
    """Rule 8, rule 13: the refusal does not wait for the other session's replay."""
    _alive, handle = collected(block, x)
    gate = Gate(block, wait)
    fire = start(lambda: recompute_handle(handle, "first"))
    wait(gate.reached)
    with pytest.raises(FrameBusyError):
        start(lambda: recompute_handle(handle, "second")).result()
    gate.opened.set()
    fire.result()
    assert block.replays == 1


def test_is_recomputing_answers_for_its_own_thread(block, x, start, wait):
    """Rule 18: while one thread replays, another does not."""
    _alive, handle = collected(block, x)
    gate = Gate(block, wait)
    fire = start(lambda: recompute_handle(handle, "s"))
    wait(gate.reached)
    here = is_recomputing()
    gate.opened.set()
    fire.result()
    assert here is False


def test_a_context_opened_while_a_backward_runs_elsewhere_keeps_both_right(block, x, start, wait, equal):
    """Rule 9: a context that opens in the middle of another thread's plain backward takes nothing from it."""
    output, handle = collected(block, x)
    recompute_handle(handle, "s")
    gate = Gate(block, wait, run=3)
    backward = start(lambda: torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True))
    wait(gate.reached)
    with recompute_session_ctx("s", retain_on_unpack=True):
        gate.opened.set()
        plain = backward.result()
        grads = torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)
    clear_recompute_session("s")
    assert equal(plain, block.gradients(x))
    assert equal(grads, block.gradients(x))
    assert (block.replays, block.held_bytes) == (2, 0)
