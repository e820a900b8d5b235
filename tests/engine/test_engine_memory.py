"""Who holds a tensor, and until when. Storages are watched weakly, the cyclic collector is off."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from regrow import clear_recompute_session, is_recomputing, recompute_handle, recompute_handle_collector_ctx

pytestmark = pytest.mark.usefixtures("gc_off")


def test_nothing_of_the_inside_is_alive_after_forward(engine, track):
    """Rule 12: what the function made is gone but for its output."""
    x = torch.randn(8, requires_grad=True)
    out = engine.checkpoint(lambda t: track(track(track(t.sin()).exp()).cos()) * 2, x)
    assert (track.seen, track.alive) == (3, 0)
    del out


def test_inputs_are_alive_until_backward_and_not_after_it(engine):
    """Rule 12: a node that is done frees its slot, and the last slot frees the call with its inputs."""
    storages = []

    def run():
        x = torch.randn(8, requires_grad=True)
        h, extra = x * 2, torch.randn(8)
        storages.extend(StorageWeakRef(t.untyped_storage()) for t in (h, extra))
        return engine.checkpoint(lambda h, parts: (h * parts[0]).sin().exp(), h, [extra])

    out = run()
    before = [storage.expired() for storage in storages]
    out.sum().backward()
    after = [storage.expired() for storage in storages]
    assert (before, after) == ([False, False], [True, True])
    assert out is not None  # the output lives on; the inputs do not hang on it


def test_inputs_die_with_a_graph_that_is_dropped_without_backward(engine):
    """Rule 12: dropping the output drops the call."""
    extra = torch.randn(8)
    storage = StorageWeakRef(extra.untyped_storage())
    out = engine.checkpoint(lambda t, e: (t * e).sin(), torch.randn(8, requires_grad=True), extra)
    del extra
    assert not storage.expired()
    del out
    assert storage.expired()


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_a_function_that_overwrites_its_input_dies_with_its_graph(engine):
    """Rule 12: the input then belongs to the graph that holds the call; that circle must not keep itself alive."""
    storages = []

    def run():
        x = torch.randn(8, requires_grad=True)
        h = x * 1
        storages.append(StorageWeakRef(h.untyped_storage()))
        return engine.checkpoint(lambda t: t.mul_(torch.full((8,), 2.0)).sin(), h)

    out = run()
    del out
    gc.collect()
    assert storages[0].expired()


def test_the_function_dies_with_the_graph(engine):
    """Rule 12: a closure and what it captured are held as long as backward may need them."""

    class Big:
        pass

    def build():
        big = Big()
        x = torch.randn(8, requires_grad=True)
        return weakref.ref(big), engine.checkpoint(lambda t: (t * 2).sin() if big else t, x)

    captured, out = build()
    held = captured() is not None
    out.sum().backward()
    assert (held, captured()) == (True, None)


def test_regrown_tensors_are_gone_after_backward(engine, track):
    """Rule 6: whatever the replay brought back, read or not."""
    x = torch.randn(8, requires_grad=True)
    out = engine.checkpoint(lambda t: track(track(track(t.sin()).exp()).cos()).tanh(), x)
    out.sum().backward()
    assert track.seen > 3
    assert track.alive == 0


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_retained_graph_retains_nothing_regrown(engine, track, create_graph):
    """Rule 6: the graph stays, the replay of a backward ends with that backward."""
    x = torch.randn(8, requires_grad=True)
    loss = engine.checkpoint(lambda t: track(track(track(t.sin()).exp()).cos()).tanh(), x).sum()
    alive = []
    for _ in range(3):
        grads = torch.autograd.grad(loss, x, retain_graph=True, create_graph=create_graph)
        del grads
        alive.append(track.alive)
    assert alive == [0, 0, 0]


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_a_partial_backward_retains_nothing_regrown(engine, track):
    """Rule 6: values that this backward did not read are released with those it read."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def region(a, b):
        return track(track(a.sin()) @ track(b.exp()))

    loss = engine.checkpoint(region, x, w).cos().sum()
    torch.autograd.grad(loss, [x], retain_graph=True)
    assert track.alive == 1  # the output, which cos saved


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_regrown_tensors_are_freed_node_by_node_during_backward(engine, track):
    """Rule 12: when backward has passed an operator, what that one saved is gone."""
    alive = []
    x = torch.randn(8, requires_grad=True)

    def region(t):
        for _ in range(4):
            t = track(t.sin())
            t.register_hook(lambda grad: alive.append(track.alive))
        return t * 1

    engine.checkpoint(region, x).sum().backward()
    assert alive[0] == 0  # nothing is replayed before the first read
    assert alive[1:] == [2, 1, 0]


def test_chained_calls_hold_one_replay_at_a_time(engine, track):
    """Rule 6: the replay of the last call is gone when the first is replayed."""
    peak = [0]

    def region(t):
        for _ in range(5):
            t = track(t.sin())
        peak[0] = max(peak[0], track.alive)
        return t

    x = torch.randn(8, requires_grad=True)
    h = x
    for _ in range(6):
        h = engine.checkpoint(region, h)
    loss = h.sum()
    del h
    borders = track.alive
    peak[0] = 0
    loss.backward()
    assert borders <= 6
    assert peak[0] <= borders + 5
    assert track.alive == 0


FAILURES = {
    "in a hook inside the call": "inside",
    "in a node before the call": "before",
    "in the replay": "replay",
}


@pytest.mark.only("hooks", because="a failed backward releases a call of the other engine")
@pytest.mark.parametrize("where", FAILURES)
def test_a_backward_that_fails_releases_what_it_had_regrown(engine, track, where):
    """Rule 6, rule 11: by an error too, while the graph is held."""
    fail = []

    def boom(*_):
        if fail:
            raise KeyError("boom")

    def region(t):
        h = track(t.sin())
        if h.requires_grad and FAILURES[where] == "inside":
            h.register_hook(boom)
        h = track(track(h.exp()).cos())
        if FAILURES[where] == "replay":
            boom()
        return h.tanh()

    x = torch.randn(8, requires_grad=True)
    h = x * 1
    if FAILURES[where] == "before":
        h.register_hook(boom)
    loss = engine.checkpoint(region, h).sum()
    fail.append(True)
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    assert track.alive == 0
    fail.clear()
    loss.backward()
    want = x.detach().clone().requires_grad_()
    want.sin().exp().cos().tanh().sum().backward()
    torch.testing.assert_close(x.grad, want.grad, rtol=0, atol=0)


def test_a_failed_backward_on_another_thread_releases_too(engine, track, anywhere):
    """Rule 6: the end of a graph task is noticed on any thread."""
    x = torch.randn(8, requires_grad=True)
    h = x * 1

    def boom(grad):
        raise KeyError("boom")

    h.register_hook(boom)
    loss = engine.checkpoint(lambda t: track(track(t.sin()).exp()).cos(), h).sum()
    with pytest.raises(KeyError):
        anywhere(lambda: loss.backward(retain_graph=True))
    assert track.alive == 0


def test_a_replay_that_fails_after_its_session_was_cleared_leaves_nothing(engine, track):
    """Rule 11: what it brings back after the clear is released with the rest."""

    def region(t):
        h = track(t.sin()).exp()
        if is_recomputing():
            clear_recompute_session("session")
        h = track(track(h.cos()).tanh())
        if is_recomputing():
            raise KeyError("replay")
        return h.sigmoid()

    with recompute_handle_collector_ctx() as handles:
        out = engine.checkpoint(region, torch.randn(8, requires_grad=True)).sum()
    with pytest.raises(KeyError):
        recompute_handle(handles[0], "session")
    assert track.alive == 0
    del out


def test_a_failed_forward_leaves_nothing(engine, track):
    """Rule 11: no handle, no tensor."""
    x = torch.randn(8, requires_grad=True)

    def region(t):
        track(track(t.sin()).exp())
        raise KeyError("forward")

    with recompute_handle_collector_ctx() as handles, pytest.raises(KeyError):
        engine.checkpoint(region, x)
    assert (handles, track.alive) == ([], 0)


def test_a_node_that_dies_frees_its_regrown_tensor_at_once(engine, track):
    """Rule 12: half of the graph is dropped between two passes."""
    x = torch.randn(8, requires_grad=True)
    a, b = engine.checkpoint(lambda t: (track(t.sin()).exp(), track(t.cos()).tanh()), x)
    torch.autograd.grad(a.sum(), x)
    alive = track.alive
    del a, b
    assert (alive, track.alive) == (0, 0)


def test_nothing_grows_with_the_number_of_steps(engine):
    """Rule 12: the number of objects that the collector knows is the same after many steps as after a few."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4, requires_grad=True)

    def step():
        engine.checkpoint(net, engine.checkpoint(net, x)).sum().backward()

    def objects():
        return len(gc.get_objects())

    for _ in range(5):
        step()
    before = objects()
    for _ in range(30):
        step()
    assert objects() - before < 10


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_no_cycles_are_left_for_the_collector(engine):
    """Rule 12: a step with nesting, a policy, gradients inside and a second backward leaves nothing to collect."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def region(t):
        h = engine.checkpoint(lambda u: (u @ w).sin(), t)
        (inner,) = torch.autograd.grad(h.sum(), t, retain_graph=True)
        return (h * inner).exp()

    def step():
        loss = engine.checkpoint(region, x * 1).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        kept = engine.checkpoint(lambda t: torch.tanh(t @ w).exp(), x, policy_fn=lambda ctx, op, *a, **k: True)
        kept.sum().backward()

    step()
    gc.collect()
    step()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        leaked = [thing for thing in gc.garbage if "regrow" in type(thing).__module__ or torch.is_tensor(thing)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert leaked == []


def test_a_handle_keeps_nothing_alive(engine, track):
    """Rule 12: not the call, not its inputs, not its output."""
    with recompute_handle_collector_ctx() as handles:
        x = track(torch.randn(8).requires_grad_())
        out = track(engine.checkpoint(lambda t: t.sin().exp(), x))
    del x, out
    assert (len(handles), track.alive) == (1, 0)


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere")
def test_the_output_may_be_held_by_what_the_function_captured_after_backward(engine, track):
    """Rule 12: a module that caches its last output is the usual case; backward breaks the circle."""

    class Caching(nn.Module):
        def forward(self, t):
            self.last = (t.sin() * 2).exp()
            return self.last

    def run():
        module, x = Caching(), torch.randn(8, requires_grad=True)
        out = track(engine.checkpoint(module, x))
        out.sum().backward()

    run()
    assert track.alive == 0
