"""One replay for a whole session, however many pieces backward is cut into; what it costs otherwise."""

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from regrow import (
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from tests.sessions.calls import checkpoint

pytestmark = pytest.mark.usefixtures("on_each_engine")


def chain(blocks, x, call):
    for block in blocks:
        x = call(block, x)
    return x


def weights_of(blocks):
    return [weight for block in blocks for weight in block.weights]


def plain_gradients(blocks, x):
    """The oracle; the runs it makes are taken off again."""
    output = chain(blocks, x, lambda block, y: block(y))
    grads = torch.autograd.grad(output.sum(), [x, *weights_of(blocks)])
    for block in blocks:
        block.runs -= 1
    return list(grads)


@pytest.mark.parametrize("prefired", [True, False])
def test_dx_and_a_dw_for_each_weight_share_one_replay(prefired, make_block, x, equal):
    """Rule 9: under one session, prefire, dx and every group of dw run the function once more in all."""
    blocks = [make_block(seed=seed) for seed in range(3)]
    plain = plain_gradients(blocks, x)
    with recompute_session_ctx("s", retain_on_unpack=True):
        with recompute_handle_collector_ctx() as handles:
            loss = chain(blocks, x, checkpoint).sum()
        if prefired:
            for handle in handles:
                recompute_handle(handle, "s")
    with recompute_session_ctx("s", retain_on_unpack=True):
        grads = list(torch.autograd.grad(loss, x, retain_graph=True))
        for weight in weights_of(blocks):
            grads += torch.autograd.grad(loss, weight, retain_graph=True)
    assert equal(grads, plain)
    assert [block.replays for block in blocks] == [1, 1, 1]


@pytest.mark.parametrize("prefired", [True, False])
@pytest.mark.parametrize("lets_go", [True, False])
def test_the_split_of_pipeline_stages_replays_once(prefired, lets_go, make_block, x, equal):
    """Rule 9: torch's own stage_backward_input and stage_backward_weight share one replay per frame."""
    blocks = [make_block(seed=seed) for seed in range(3)]
    plain = plain_gradients(blocks, x)
    with recompute_session_ctx("s", retain_on_unpack=True), recompute_handle_collector_ctx() as handles:
        loss = chain(blocks, x, checkpoint).sum()
    if prefired:
        for handle in handles:
            recompute_handle(handle, "s")
    with recompute_session_ctx("s", retain_on_unpack=True):
        grads, groups = stage_backward_input([loss], None, [x], iter(weights_of(blocks)))
    with recompute_session_ctx("s", retain_on_unpack=not lets_go):
        stage_backward_weight(iter(weights_of(blocks)), groups)
    clear_recompute_session("s")
    assert equal([*grads, *(weight.grad for weight in weights_of(blocks))], plain)
    assert [block.replays for block in blocks] == [1, 1, 1]


def test_the_timeline_of_a_scheduled_micro_batch(block, x):
    """Rule 9: forward, then the replay where it was fired, then dx and dw without another."""
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    with recompute_session_ctx("s", retain_on_unpack=True):
        block.timeline.append("prefire")
        recompute_handle(handles[0], "s")
    with recompute_session_ctx("s", retain_on_unpack=True):
        block.timeline.append("dx")
        torch.autograd.grad(output.sum(), x, retain_graph=True)
    with recompute_session_ctx("s", retain_on_unpack=False):
        block.timeline.append("dw")
        torch.autograd.grad(output.sum(), block.weights)
    clear_recompute_session("s")
    assert block.timeline == ["forward", "prefire", "replay", "dx", "dw"]


def test_without_a_prefire_the_first_pass_replays(block, x):
    """Rule 9: a call of the session replays once, lazily, in the first pass that reaches it."""
    with recompute_session_ctx("s", retain_on_unpack=True):
        output = checkpoint(block, x)
        block.timeline.append("dx")
        torch.autograd.grad(output.sum(), x, retain_graph=True)
        block.timeline.append("dw")
        torch.autograd.grad(output.sum(), block.weights)
    clear_recompute_session("s")
    assert block.timeline == ["forward", "dx", "replay", "dw"]


def test_contexts_of_one_session_may_be_left_between_passes(block, x, equal):
    """Rule 8: a call made in a context belongs to the session until clear, in later contexts, too."""
    with recompute_session_ctx("s"):
        output = checkpoint(block, x)
    with recompute_session_ctx("s", retain_on_unpack=True):
        dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
    with recompute_session_ctx("s", retain_on_unpack=True):
        dw = torch.autograd.grad(output.sum(), block.weights)
    assert equal([*dx, *dw], block.gradients(x))
    assert block.replays == 1


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop_does_not_change_what_a_session_shares(early_stop, block, x, equal):
    """Rule 5, rule 9: one replay for dx and dw, with early stop and without."""
    with recompute_session_ctx("s", retain_on_unpack=True):
        output = checkpoint(block, x, early_stop=early_stop)
        dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
        dw = torch.autograd.grad(output.sum(), block.weights)
    assert equal([*dx, *dw], block.gradients(x))
    assert block.replays == 1


def test_a_call_of_no_session_replays_in_every_pass(block, x, equal):
    """Rule 6: a call that is neither prefired nor made in the session replays for each backward, also in a context."""
    output = checkpoint(block, x)
    with recompute_session_ctx("s", retain_on_unpack=True):
        dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
        dw = torch.autograd.grad(output.sum(), block.weights)
    assert equal([*dx, *dw], block.gradients(x))
    assert block.replays == 2


def test_a_plain_backward_meanwhile_replays_for_itself_and_evicts_nothing(block, x, equal):
    """Rule 9: the session's values outlive a plain backward that runs between its passes."""
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    recompute_handle(handles[0], "s")
    plain = torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)
    after_first = block.replays
    with recompute_session_ctx("s", retain_on_unpack=True):
        dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
    again = torch.autograd.grad(output.sum(), [x, *block.weights], retain_graph=True)
    after_second = block.replays
    with recompute_session_ctx("s", retain_on_unpack=True):
        dw = torch.autograd.grad(output.sum(), block.weights)
    assert all(equal(grads, block.gradients(x)) for grads in (plain, again, [*dx, *dw]))
    assert (after_first, after_second, block.replays) == (2, 3, 3)


def test_a_plain_backward_frees_its_own_values_only(block, x):
    """Rule 9: when a plain backward ends, what is held is what the session holds."""
    with recompute_handle_collector_ctx() as handles:
        output = checkpoint(block, x)
    recompute_handle(handles[0], "s")
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert block.held_bytes == block.held_when_filled


@pytest.mark.only("hooks", because="gradients of the other engine have no graph")
def test_a_session_serves_a_pass_of_second_order(block, x, equal):
    """Rule 1: backward of backward in a session equals plain autograd."""
    first = torch.autograd.grad(((x @ block.inner).sin() @ block.outer).cos().sum(), x, create_graph=True)
    plain = torch.autograd.grad(first[0].square().sum(), [x, *block.weights])
    with recompute_session_ctx("s", retain_on_unpack=True):
        output = checkpoint(block, x)
        (dx,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        second = torch.autograd.grad(dx.square().sum(), [x, *block.weights])
    assert equal([dx, *second], [*first, *plain])
    assert block.replays == 1


def test_a_pass_that_lets_go_costs_the_next_pass_one_replay(block, x, equal):
    """Rule 9: values that a pass let go come back with one more replay, and are right."""
    with recompute_session_ctx("s"):
        output = checkpoint(block, x)
        dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
    with recompute_session_ctx("s", retain_on_unpack=True):
        dw = torch.autograd.grad(output.sum(), block.weights)
    assert equal([*dx, *dw], block.gradients(x))
    assert block.replays == 2


@pytest.mark.only("hooks", because="a session holds the graph of a reentrant replay as a whole")
def test_groups_of_one_letting_go_context_cost_one_more_replay_at_most(make_block, x, equal):
    """Rule 14: groups that read the same value in a context that lets go share one further replay."""
    blocks = [make_block(seed=seed) for seed in range(3)]
    plain = plain_gradients(blocks, x)
    with recompute_session_ctx("s"):
        loss = chain(blocks, x, checkpoint).sum()
        grads = [
            grad for target in [x, *weights_of(blocks)] for grad in torch.autograd.grad(loss, target, retain_graph=True)
        ]
    assert equal(grads, plain)
    assert all(block.replays <= 2 for block in blocks)


def test_gradients_accumulate_and_hooks_run_once_for_each_pass(block, x, equal):
    """Rule 1: backward() into leaves, twice in one session: sums and hook counts of plain autograd."""
    seen = []
    for weight in block.weights:
        weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.shape))
    with recompute_session_ctx("s", retain_on_unpack=True):
        output = checkpoint(block, x)
        output.sum().backward(retain_graph=True)
        output.sum().backward()
    clear_recompute_session("s")
    doubled = [2 * grad for grad in block.gradients(x)]
    assert equal([x.grad, *(weight.grad for weight in block.weights)], doubled)
    assert (len(seen), block.replays) == (4, 1)


class ReadTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, grad):
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        return grad * (first + second)


def reads_twice(y):
    return ReadTwice.apply(y.sin()).cos()


def counting(function):
    runs = []

    def counted(*args):
        runs.append(1)
        return function(*args)

    return counted, runs


@pytest.mark.parametrize(
    ("session", "retain", "retain_graph", "most"),
    [
        (False, False, False, 1),
        (False, False, True, 2),
        (True, True, True, 1),
        (True, True, False, 1),
        (True, False, True, 2),
        (True, False, False, 2),
    ],
)
def test_a_value_that_is_read_twice_in_one_pass_is_right(session, retain, retain_graph, most, x, equal):
    """Rule 14: the value is right, at worst at the price of one more replay."""
    plain = torch.autograd.grad(reads_twice(x).sum(), x)
    function, runs = counting(reads_twice)
    if session:
        with recompute_session_ctx("s", retain_on_unpack=retain):
            output = checkpoint(function, x)
            grads = torch.autograd.grad(output.sum(), x, retain_graph=retain_graph)
    else:
        output = checkpoint(function, x)
        grads = torch.autograd.grad(output.sum(), x, retain_graph=retain_graph)
    assert equal(grads, plain)
    assert len(runs) - 1 <= most


def test_many_values_that_are_read_twice_cost_one_more_replay_in_all(x, equal):
    """Rule 14: once a pass has read twice, its values stay until it ends."""

    def function(y):
        for _ in range(4):
            y = reads_twice(y)
        return y

    plain = torch.autograd.grad(function(x).sum(), x)
    counted, runs = counting(function)
    with recompute_session_ctx("s"):
        output = checkpoint(counted, x)
        grads = torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert equal(grads, plain)
    assert len(runs) - 1 <= 2


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
def test_a_saved_value_read_outside_backward_is_right_and_keeps_nothing(block, x):
    """Rule 6: outside backward a read makes a replay of its own, which leaves nothing behind."""
    output = checkpoint(block, x)
    saved = output.grad_fn._saved_self
    assert torch.equal(saved, (x @ block.inner).sin() @ block.outer)
    assert (block.replays, block.held_bytes) == (1, saved.untyped_storage().nbytes())


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
def test_a_read_outside_backward_leaves_a_session_alone(block, x, equal):
    """Rule 9: a debugger that looks at a saved tensor between two passes evicts nothing."""
    with recompute_session_ctx("s", retain_on_unpack=True):
        output = checkpoint(block, x)
        dx = torch.autograd.grad(output.sum(), x, retain_graph=True)
    looked = torch.equal(output.grad_fn._saved_self, (x @ block.inner).sin() @ block.outer)
    with recompute_session_ctx("s", retain_on_unpack=True):
        dw = torch.autograd.grad(output.sum(), block.weights)
    assert looked
    assert equal([*dx, *dw], block.gradients(x))
    assert block.replays == 2


@pytest.mark.only(
    "hooks",
    because="a backward that used it up, or failed, releases a reentrant call",
)
def test_a_frame_whose_graph_is_partly_gone_brings_back_what_is_left(x):
    """Rule 12: a prefire after a partial backward fills the slots that are left."""

    def heads(y):
        return y.sin().exp(), y.cos().tanh()

    expected = torch.autograd.grad(x.cos().tanh().sum(), x)
    with recompute_handle_collector_ctx() as handles:
        first, second = checkpoint(heads, x)
    torch.autograd.grad(first.sum(), x)
    recompute_handle(handles[0], "s")
    with recompute_session_ctx("s"):
        grads = torch.autograd.grad(second.sum(), x)
    assert torch.equal(grads[0], expected[0])
