"""Checkpoints inside checkpoints in sessions: the inner ones belong to the session of the outer one."""

from itertools import permutations

import pytest
import torch

from regrow import (
    FrameBusyError,
    checkpoint,
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)


class Nest:
    """An outer call around two inner ones, with their counts."""

    def __init__(self, make_block):
        self.first, self.second = make_block(seed=1), make_block(seed=2)
        self.outer_runs = 0

    def outer(self, x):
        self.outer_runs += 1
        return checkpoint(self.second, checkpoint(self.first, x * 1.0).sin())

    @property
    def weights(self):
        return [*self.first.weights, *self.second.weights]

    def plain(self, x):
        def run(block, t):
            return ((t @ block.inner).sin() @ block.outer).cos()

        loss = run(self.second, run(self.first, x * 1.0).sin()).sum()
        return torch.autograd.grad(loss, [x, *self.weights])

    def forward(self, x):
        with recompute_handle_collector_ctx() as handles:
            output = checkpoint(self.outer, x)
        return output.sum(), handles

    @property
    def runs(self):
        return self.outer_runs, self.first.runs, self.second.runs

    @property
    def held_bytes(self):
        return self.first.held_bytes + self.second.held_bytes


@pytest.fixture
def nest(make_block):
    return Nest(make_block)


def split(loss, x, weights):
    """Gradients of the input, then of each weight by itself, in one session."""
    with recompute_session_ctx("s", retain_on_unpack=True):
        dx = torch.autograd.grad(loss, x, retain_graph=True)
        dw = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for weight in weights]
    return [*dx, *dw]


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_a_prefired_nest_runs_as_in_one_full_backward(nest, x, equal, order):
    """Rule 15: outer 2, inner 3 and 2, whichever is fired first and into however many pieces backward is cut."""
    loss, handles = nest.forward(x)
    assert len(handles) == 3
    for index in order:
        recompute_handle(handles[index], "s")
    assert nest.runs == (2, 3, 2)
    assert equal(split(loss, x, nest.weights), nest.plain(x))
    assert nest.runs == (2, 3, 2)
    clear_recompute_session("s")
    assert nest.held_bytes == 0


@pytest.mark.parametrize("fired", [[], [0], [1], [2]])
def test_what_is_not_fired_is_replayed_once_when_it_is_read(nest, x, equal, fired):
    """Rule 15: the handle of any of them brings the others into its session."""
    with recompute_session_ctx("s", retain_on_unpack=True):
        loss, handles = nest.forward(x)
    for index in fired:
        recompute_handle(handles[index], "s")
    assert equal(split(loss, x, nest.weights), nest.plain(x))
    assert nest.runs == (2, 3, 2)
    clear_recompute_session("s")
    assert nest.held_bytes == 0


def test_the_outer_handle_brings_the_inner_calls_into_the_session(nest, x, equal):
    """Rule 15: only the outer call is fired, and no context was open in forward."""
    loss, handles = nest.forward(x)
    recompute_handle(handles[0], "s")
    assert equal(split(loss, x, nest.weights), nest.plain(x))
    assert nest.runs == (2, 3, 2)
    clear_recompute_session("s")


def test_an_inner_handle_brings_the_outer_call_into_the_session(nest, x, equal):
    """Rule 15: its inputs come out of the outer call, which is replayed for the session, once."""
    loss, handles = nest.forward(x)
    recompute_handle(handles[2], "s")
    assert nest.runs[0] == 2
    assert equal(split(loss, x, nest.weights), nest.plain(x))
    assert nest.runs == (2, 3, 2)
    clear_recompute_session("s")


def test_a_read_that_lets_go(nest, x, equal):
    """Rule 9: one backward in a context that keeps nothing."""
    loss, handles = nest.forward(x)
    for handle in handles:
        recompute_handle(handle, "s")
    with recompute_session_ctx("s"):
        grads = torch.autograd.grad(loss, [x, *nest.weights])
    assert equal(grads, nest.plain(x))
    assert nest.runs == (2, 3, 2)
    assert nest.held_bytes == 0
    clear_recompute_session("s")


def test_a_plain_backward_after_clear(nest, x, equal):
    """Rule 11: it replays for itself."""
    loss, handles = nest.forward(x)
    recompute_handle(handles[0], "s")
    clear_recompute_session("s")
    assert equal(torch.autograd.grad(loss, [x, *nest.weights]), nest.plain(x))


def test_another_session_on_an_inner_call_is_refused(nest, x, equal):
    """Rule 8: and nothing is changed, neither in the inner call nor around it."""
    loss, handles = nest.forward(x)
    recompute_handle(handles[1], "inner")
    runs = nest.runs
    with pytest.raises(FrameBusyError) as refused:
        recompute_handle(handles[0], "outer")
    assert (refused.value.owner, refused.value.wanted, nest.runs) == ("inner", "outer", runs)
    clear_recompute_session("inner")
    recompute_handle(handles[0], "outer")
    clear_recompute_session("outer")
    assert equal(torch.autograd.grad(loss, [x, *nest.weights]), nest.plain(x))


def test_an_outer_replay_that_fails_frees_all_of_them(nest, x, equal):
    """Rule 11: nothing stays bound, nothing is held."""
    loss, handles = nest.forward(x)

    def fail(runs):
        raise KeyError("planned")

    nest.first.halfway = fail
    with pytest.raises(KeyError):
        recompute_handle(handles[0], "s")
    assert nest.held_bytes == 0
    nest.first.halfway = lambda runs: None
    for handle in handles:
        recompute_handle(handle, "t")
    with recompute_session_ctx("t"):
        grads = torch.autograd.grad(loss, [x, *nest.weights])
    clear_recompute_session("t")
    assert equal(grads, nest.plain(x))


@pytest.mark.parametrize("depth", [2, 4])
def test_deeper_nests(x, equal, depth):
    """Rule 15: every level belongs to the session; gradients are the plain ones, dropout included."""
    weight = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)

    def level(n, call):
        def run(t):
            h = torch.dropout(t @ weight, 0.3, True).sin()
            return (call(level(n - 1, call), h) if n else h).tanh() * t

        return run

    torch.manual_seed(1)
    plain = level(depth, lambda function, t: function(t))(x).sum()
    want = torch.autograd.grad(plain, [x, weight])
    torch.manual_seed(1)
    with recompute_handle_collector_ctx() as handles:
        loss = checkpoint(level(depth, checkpoint), x).sum()
    for handle in reversed(handles):
        recompute_handle(handle, "s")
    assert equal(split(loss, x, [weight]), want)
    clear_recompute_session("s")


def test_policies_inside_a_nest(x, equal):
    """Rule 16: the inner call keeps its products, in every replay that reads them."""
    weight = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)

    def keeps(ctx, op, *args, **kwargs):
        return op is torch.ops.aten.mm.default

    def outer(t, call):
        return call(lambda u: (u @ weight).sin().exp(), t.cos()).tanh()

    want = torch.autograd.grad(outer(x, lambda function, t: function(t)).sum(), [x, weight])
    with recompute_handle_collector_ctx() as handles:
        loss = checkpoint(outer, x, lambda function, t: checkpoint(function, t, policy_fn=keeps)).sum()
    for handle in handles:
        recompute_handle(handle, "s")
    assert equal(split(loss, x, [weight]), want)
    clear_recompute_session("s")
