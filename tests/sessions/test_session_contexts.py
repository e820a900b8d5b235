"""Contexts: opened by an explicit id, nested only with the same, left as they were entered."""

import contextvars

import pytest
import torch

from regrow import (
    clear_recompute_session,
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


def read(output, x):
    return torch.autograd.grad(output.sum(), x, retain_graph=True)


def test_an_inner_context_that_lets_go_wins_inside(block, x):
    """Rule 10: contexts nest with the same id, and the inner retain_on_unpack holds inside."""
    output, _ = fired(block, x)
    with recompute_session_ctx("s", retain_on_unpack=True), recompute_session_ctx("s", retain_on_unpack=False):
        read(output, x)
    assert block.held_bytes == 0


def test_an_inner_context_that_retains_wins_inside(block, x):
    """Rule 10: an inner context that retains keeps, although the outer one lets go."""
    output, _ = fired(block, x)
    with recompute_session_ctx("s", retain_on_unpack=False), recompute_session_ctx("s", retain_on_unpack=True):
        read(output, x)
    assert (block.held_bytes, block.replays) == (block.held_when_filled, 1)


@pytest.mark.parametrize(("outer", "held"), [(True, Ellipsis), (False, 0)])
def test_the_outer_choice_holds_again_after_the_inner_context(outer, held, block, x):
    """Rule 10: when the inner context is left, the outer retain_on_unpack holds."""
    output, _ = fired(block, x)
    with recompute_session_ctx("s", retain_on_unpack=outer):
        with recompute_session_ctx("s", retain_on_unpack=not outer):
            pass
        read(output, x)
    assert block.held_bytes == (block.held_when_filled if held is Ellipsis else held)


def test_contexts_let_go_unless_they_are_told_to_retain(block, x):
    """Rule 10: retain_on_unpack is False by default."""
    output, _ = fired(block, x)
    with recompute_session_ctx("s"):
        read(output, x)
    assert block.held_bytes == 0


def test_another_id_inside_a_context_is_refused(block, x, equal):
    """Rule 10: contexts nest only with the same id; the error names both, the outer one stays open."""
    output, _ = fired(block, x, "outer")
    with recompute_session_ctx("outer", retain_on_unpack=True):
        with pytest.raises(ValueError, match="session_id") as caught, recompute_session_ctx("inner"):
            pass
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert "'outer'" in str(caught.value)
    assert "'inner'" in str(caught.value)
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def test_prefire_inside_a_context_that_lets_go_is_refused(block, x, equal):
    """Rule 10: prefire inside a non-retaining context is a ValueError, and the call stays free."""
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    with pytest.raises(ValueError, match="retain_on_unpack"), recompute_session_ctx("s"):
        recompute_handle(handles[0], "s")
    recompute_handle(handles[0], "other")
    with recompute_session_ctx("other"):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def test_prefire_inside_an_inner_context_that_lets_go_is_refused(block, x):
    """Rule 10: the inner retain_on_unpack is the one that counts for a prefire."""
    with recompute_handle_collector_ctx() as handles:
        _alive = checkpoint(block, x)
    with (
        pytest.raises(ValueError, match="retain_on_unpack"),
        recompute_session_ctx("s", retain_on_unpack=True),
        recompute_session_ctx("s"),
    ):
        recompute_handle(handles[0], "s")
    assert block.replays == 0


def test_prefire_inside_an_inner_context_that_retains_stands(block, x):
    """Rule 10: an inner retaining context allows what its outer one does not."""
    with recompute_handle_collector_ctx() as handles:
        _alive = checkpoint(block, x)
    with recompute_session_ctx("s"), recompute_session_ctx("s", retain_on_unpack=True):
        recompute_handle(handles[0], "s")
    assert block.held_bytes == block.held_when_filled


def test_prefire_inside_the_context_of_another_session_is_refused(block, x, equal):
    """Rule 10: prefire in a foreign context is a ValueError that names both, and the call stays free."""
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    with pytest.raises(ValueError, match="session_id") as caught, recompute_session_ctx("a", retain_on_unpack=True):
        recompute_handle(handles[0], "b")
    recompute_handle(handles[0], "c")
    with recompute_session_ctx("c"):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert "'a'" in str(caught.value)
    assert "'b'" in str(caught.value)
    assert equal(grads, block.gradients(x))


@pytest.mark.parametrize("bad_id", [None, [], {}, ("s", []), float("nan"), torch.ones(2), torch.tensor(1)])
def test_an_id_that_cannot_be_named_again_is_refused(bad_id):
    """Rule 19: a context with a bad id is a ValueError before it is entered."""
    with pytest.raises(ValueError, match="session_id"):
        recompute_session_ctx(bad_id)


@pytest.mark.parametrize("flag", [1, 0, "yes", None])
def test_retain_on_unpack_is_a_flag(flag):
    """Rule 19: retain_on_unpack takes True and False alone."""
    with pytest.raises(ValueError, match="retain_on_unpack"):
        recompute_session_ctx("s", retain_on_unpack=flag)


def test_a_context_left_by_an_exception_is_left(block, x, equal):
    """Rule 10: after an exception the next context may have any id, and calls made outside belong to none."""
    with pytest.raises(ZeroDivisionError), recompute_session_ctx("s"):
        raise ZeroDivisionError
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    with recompute_session_ctx("other", retain_on_unpack=True):
        recompute_handle(handles[0], "other")
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


def test_a_context_left_where_it_was_not_entered_is_closed_all_the_same(block, x, equal):
    """Rule 10: contextvars refuse to leave it in another context; the session is not left open by that."""
    context = recompute_session_ctx("s", retain_on_unpack=True)
    contextvars.copy_context().run(context.__enter__)
    with pytest.raises(ValueError, match="different Context"):
        context.__exit__(None, None, None)
    output, _ = fired(block, x)
    grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 2


def test_a_call_made_after_the_context_belongs_to_no_session(block, x):
    """Rule 8: only calls made while the context is open are bound."""
    with recompute_session_ctx("s"):
        pass
    with recompute_handle_collector_ctx() as handles:
        _alive = checkpoint(block, x)
    recompute_handle(handles[0], "other")
    assert block.replays == 1


def test_a_call_fired_while_its_context_is_open_elsewhere_joins_it(block, x, start, equal):
    """Rule 8: a call fired for a session is read in the contexts that were open before."""
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    with recompute_session_ctx("s", retain_on_unpack=True):
        start(lambda: recompute_handle(handles[0], "s")).result()
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    assert block.replays == 1


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_a_replay_does_not_bind_what_it_makes(make_block, x, equal):
    """Rule 8: calls that a plain replay makes inside an open context belong to no session."""
    inner = make_block()

    def outer(y):
        return checkpoint(inner, y).sin()

    output = checkpoint(outer, x)
    with recompute_session_ctx("s", retain_on_unpack=True):
        grads = torch.autograd.grad(output.sum(), [x, *inner.weights])
    clear_recompute_session("s")
    plain = torch.autograd.grad(((x @ inner.inner).sin() @ inner.outer).cos().sin().sum(), [x, *inner.weights])
    assert equal(grads, plain)
    assert inner.held_bytes == 0


def test_a_context_that_was_left_binds_nothing_in_a_copy_of_its_variables(block, x, equal):
    """Rule 10: a task started inside the context may outlive it; what it makes afterwards is nobody's."""
    with recompute_session_ctx("left", retain_on_unpack=True):
        inherited = contextvars.copy_context()

    def later():
        with recompute_session_ctx("another"), recompute_handle_collector_ctx() as handles:
            checkpoint(block, x)
        with recompute_handle_collector_ctx() as free:
            output = checkpoint(block, x)
        return handles, free, output

    _, free, output = inherited.run(later)
    recompute_handle(free[0], "mine")
    with recompute_session_ctx("mine"):
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    assert equal(grads, block.gradients(x))
    clear_recompute_session("mine")


def test_one_context_object_may_be_entered_again(block, x):
    """Rule 10: one after the other, and inside itself."""
    context = recompute_session_ctx("again", retain_on_unpack=True)
    for _ in range(2):
        with context, context:
            output = checkpoint(block, x)
        with context:
            torch.autograd.grad(output.sum(), x, retain_graph=True)
            torch.autograd.grad(output.sum(), x)
        clear_recompute_session("again")
    assert block.runs == 4


def test_a_context_decorates_a_function(block, x):
    """Rule 10: every call has a context of its own, also one that calls itself."""

    @recompute_session_ctx("decorated", retain_on_unpack=True)
    def both(depth=1):
        if depth:
            return both(depth - 1)
        output = checkpoint(block, x)
        torch.autograd.grad(output.sum(), x, retain_graph=True)
        return torch.autograd.grad(output.sum(), x)

    both()
    clear_recompute_session("decorated")
    assert block.runs == 2


def test_contexts_that_are_left_in_the_wrong_order(block, x, equal):
    """Rule 10: when both are left, nothing is open."""
    outer, inner = recompute_session_ctx("order"), recompute_session_ctx("order", retain_on_unpack=True)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    with recompute_session_ctx("other", retain_on_unpack=True):
        output = checkpoint(block, x)
        grads = torch.autograd.grad(output.sum(), [x, *block.weights])
    clear_recompute_session("other")
    assert equal(grads, block.gradients(x))
