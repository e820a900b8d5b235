"""Selective checkpointing: what is kept belongs to the call, is read by every replay, and keeps what it was."""

import gc
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from regrow import (
    CheckpointError,
    clear_recompute_session,
    create_selective_checkpoint_contexts,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)

pytestmark = pytest.mark.only("hooks", because="the other engine has no selective checkpointing")

aten = torch.ops.aten
MM = aten.mm.default


def keep(*operators):
    """A policy that keeps these operators."""
    return lambda ctx, op, *args, **kwargs: op in operators


def keep_all(ctx, op, *args, **kwargs):
    return True


class CountOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func] = self.seen.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def operators_of(run):
    """How often each operator runs."""
    with CountOperators() as count:
        run()
    return count.seen


def matrices(n=2):
    return [torch.randn(4, 4, requires_grad=True) for _ in range(n)]


def mlp(x, w):
    return torch.tanh(torch.tanh(x @ w) @ w)


ANSWERS = {
    CheckpointPolicy.MUST_SAVE: 2,
    CheckpointPolicy.PREFER_SAVE: 2,
    True: 2,
    CheckpointPolicy.MUST_RECOMPUTE: 3,
    CheckpointPolicy.PREFER_RECOMPUTE: 3,
    False: 3,
}


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_the_answers_of_a_policy(engine, answer):
    """Rule 16: how often the product runs in forward and backward together, of which two are backward's own."""
    x, w = matrices()
    out = engine.checkpoint(lambda a, b: (a @ b).sin(), x, w, policy_fn=lambda ctx, op, *args, **kwargs: answer)
    assert 1 + operators_of(out.sum().backward)[MM] == ANSWERS[answer] + 1


@pytest.mark.parametrize(
    "answer",
    [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD, None, 1, "save", np.True_, [], {}],
    ids=repr,
)
def test_an_answer_that_cannot_be_honoured_is_refused(engine, answer):
    """Rule 19: the value, the operator and what is allowed; from the call, not from backward."""
    x, w = matrices()
    with pytest.raises(ValueError, match=r"policy_fn returned .* for aten\.mm\.default.*MUST_SAVE"):
        engine.checkpoint(mlp, x, w, policy_fn=lambda ctx, op, *args, **kwargs: answer)


def test_a_policy_that_raises_fails_the_call_and_leaves_nothing(engine):
    """Rule 21: the exception is the user's own, and no handle stays."""
    x, w = matrices()

    def policy(ctx, op, *args, **kwargs):
        raise KeyError("policy")

    with recompute_handle_collector_ctx() as handles, pytest.raises(KeyError, match="policy"):
        engine.checkpoint(mlp, x, w, policy_fn=policy)
    assert handles == []


def test_what_a_policy_is_told(engine):
    """Rule 16: the operator, its arguments and its result; in forward, once per operator, never in a replay."""
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append((op, ctx.is_recompute, ctx.op_output.shape, [arg.shape for arg in args]))
        return op is MM

    x, w = matrices()
    engine.checkpoint(lambda a, b: (a @ b).sin().t().exp(), x, w, policy_fn=policy).sum().backward()
    square = torch.Size([4, 4])
    assert asked == [
        (MM, False, square, [square, square]),
        (aten.sin.default, False, square, [square]),
        (aten.exp.default, False, square, [square]),
    ]


POLICIES = {
    "products": keep(MM, aten.addmm.default, aten.bmm.default),
    "everything": keep_all,
    "nothing": keep(),
    "every other": None,
}


def every_other():
    count = [0]

    def policy(ctx, op, *args, **kwargs):
        count[0] += 1
        return count[0] % 2 == 0

    return policy


REGIONS = {
    "mlp": mlp,
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None] @ w, x[None], w[None]).sin(),
    "norms": lambda x, w: F.layer_norm(F.batch_norm(x @ w, None, None, training=True), (4,)).exp(),
    "several results": lambda x, w: sum(part.sin() for part in (x @ w).max(0)[0].split(2)) * x.sort(0)[0].sum(),
    "views between": lambda x, w: ((x @ w).view(2, 8).t()[1:5] * 2).reshape(-1).cos(),
    "in place": lambda x, w: (x @ w).add_(1).mul_(2).relu_() * x,
    "row written": lambda x, w: written(x @ w, 0, w[1]).sin(),
    "no grad part": lambda x, w: (x @ w.detach()) * torch.no_grad()(torch.sin)(x) + w.exp(),
    "made inside": lambda x, w: x * torch.ones(4, 4).cumsum(0) + torch.arange(16.0).view(4, 4).sin() * w,
    "scalar read": lambda x, w: (x @ w) * float(x.detach().abs().sum()),
    "indexed": lambda x, w: x[torch.tensor([2, 0, 3, 1])].sin() @ w.masked_fill(x.detach() > 0, 0.1),
}


def written(tensor, index, value):
    tensor[index] = value
    return tensor


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("region", REGIONS)
def test_gradients_with_any_policy(same_grads, region, policy):
    """Rule 16: whatever is kept, values and gradients are the plain ones, twice over."""

    def program(call):
        x, w = matrices()
        out = call(REGIONS[region], x, w)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        return out.detach(), x.grad, w.grad

    same_grads(program, policy_fn=POLICIES[policy] or every_other())


RANDOM = {
    "dropout": lambda t: F.dropout(t, 0.4),
    "native dropout": lambda t: torch.native_dropout(t, 0.4, True)[0],
    "rand_like": lambda t: t * torch.rand_like(t),
    "randn": lambda t: t * torch.randn(4, 4),
    "randint": lambda t: t * torch.randint(1, 5, (4, 4)),
    "randperm": lambda t: t[torch.randperm(4)],
    "bernoulli": lambda t: t * torch.bernoulli(torch.full((4, 4), 0.5)),
    "multinomial": lambda t: t[torch.multinomial(torch.ones(4), 3)],
    "normal": lambda t: t + torch.normal(t.detach(), 1.0) * t,
    "poisson": lambda t: t * torch.poisson(torch.full((4, 4), 3.0)),
    "rrelu": lambda t: F.rrelu(t, 0.1, 0.9, training=True),
    "in place": lambda t: t * torch.empty(4, 4).uniform_(),
    "exponential in place": lambda t: t * torch.ones(4, 4).exponential_(),
    "attention with dropout": lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None], dropout_p=0.3)[0],
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", ["everything", "every other", "nothing"])
@pytest.mark.parametrize("draw", RANDOM)
def test_kept_random_operators_move_the_generator_as_in_forward(same_grads, draw, policy, early_stop):
    """Rule 16: what is drawn after a kept draw is what forward drew, and the caller's stream is untouched."""

    def program(call):
        (x,) = matrices(1)

        def region(t):
            t = RANDOM[draw](t.sin())
            t = t * torch.rand(t.shape)
            return (RANDOM[draw](t) if t.shape == (4, 4) else t).exp() * torch.rand(1)

        out = call(region, x)
        between = torch.rand(2)
        out.sum().backward()
        return out.detach(), x.grad, between, torch.rand(2)

    same_grads(program, policy_fn=POLICIES[policy] or every_other(), early_stop=early_stop)


def test_a_kept_draw_moves_nothing_without_preserved_random_numbers(engine):
    """Rule 3: ``preserve_rng_state=False`` leaves the generator alone in kept operators too."""
    (x,) = matrices(1)
    out = engine.checkpoint(
        lambda t: (t * torch.rand(4, 4)).sin(), x, policy_fn=keep(aten.rand.default), preserve_rng_state=False
    )
    torch.manual_seed(8)
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


OVERWRITES = {
    "itself": lambda y, x: torch.selu_(y) * 2,
    "a view of it": lambda y, x: written(y, slice(0, 2), 0.5).sin() * x,
    "twice": lambda y, x: y.mul_(2).add_(1).exp() * x,
    "its base, read through a view": lambda y, x: (written(y.t(), 1, 2.0), y.sin() * x)[1],
    "by an index": lambda y, x: y.index_add_(0, torch.tensor([1]), x[:1]).sin(),
    "by a copy": lambda y, x: y.copy_(x).sin() + x,
    "by out": lambda y, x: y.detach().copy_(torch.ones(4, 4)) * x.sin() + x,
}
HOOKS = {
    "no hooks": nullcontext,
    "save_on_cpu": save_on_cpu,
    "hooks that hand through": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "hooks that copy": lambda: saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor),
}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_a_kept_result_that_the_function_overwrites_keeps_what_it_was(same_grads, overwrite, hooks):
    """Rule 16: forward overwrites it, and so does every replay; also where surrounding hooks hold it."""

    def program(call):
        x, w = matrices()
        with HOOKS[hooks]():
            out = call(lambda a, b: OVERWRITES[overwrite](a @ b, a), x, w)
        for retain in (True, True, False):
            out.square().sum().backward(retain_graph=retain)
        return out.detach(), x.grad, w.grad

    same_grads(program, policy_fn=keep(MM))


def test_a_kept_result_that_is_overwritten_is_not_run_again_by_later_replays(engine):
    """Rule 16: the copy that was made serves every replay."""
    x, w = matrices()
    out = engine.checkpoint(lambda a, b: torch.selu_(a @ b) * 2, x, w, policy_fn=keep(MM)).sum()
    runs = [operators_of(lambda: out.backward(retain_graph=True))[MM] for _ in range(4)]
    assert runs == [2, 2, 2, 2]  # backward's own


def test_a_kept_output_that_the_caller_overwrites_is_run_again(same_grads):
    """Rule 16: outside the call nobody can copy it first; its version tells."""

    def program(call):
        x, w = matrices()
        inner = []

        def region(a, b):
            inner.append((a @ b).detach())
            return (a @ b).sin()

        out = call(region, x, w)
        inner[0].zero_()
        out.sum().backward()
        return x.grad, w.grad

    same_grads(program, policy_fn=keep(MM))


def test_the_output_itself_kept_and_then_changed_by_the_caller(same_grads):
    """Rule 16: the last product is kept, returned, and changed in place."""

    def program(call):
        x, w = matrices()
        out = call(lambda a, b: torch.tanh(a @ b) @ b, x, w)
        out.mul_(2)
        out.sum().backward()
        return x.grad, w.grad

    same_grads(program, policy_fn=keep(MM))


def test_kept_results_pass_through_the_hooks_around_the_call(same_grads):
    """Rule 16: inputs and kept results are packed, in that order, and nothing else is."""
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    def program(call):
        packed.clear()
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = call(lambda a, b: (a @ b).sin().exp(), x, w)
        out.sum().backward()
        return x.grad, w.grad

    same_grads(program, policy_fn=keep(MM))
    assert packed == [(3, 4), (4, 5), (3, 5)]


def test_kept_results_stay_out_of_the_hooks_if_asked(engine):
    """Rule 16: ``respect_saved_tensors_hooks=False`` keeps them as they are."""
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = engine.checkpoint(lambda a, b: (a @ b).sin(), x, w, policy_fn=keep(MM), respect_saved_tensors_hooks=False)
    out.sum().backward()
    assert packed == [(3, 4), (4, 5)]


def test_what_is_kept_is_freed_with_the_graph(engine, gc_off):
    """Rule 12: by the last reference, after a backward and without one."""
    kept = []

    def region(a, b):
        y = a @ b
        kept.append(StorageWeakRef(y.untyped_storage()))
        return y.sin().exp()

    def alive(finish):
        kept.clear()
        x, w = matrices()
        loss = engine.checkpoint(region, x, w, policy_fn=keep(MM)).sum()
        before = not kept[0].expired()
        finish(loss)
        del loss
        return before, not kept[0].expired()

    assert alive(lambda loss: loss.backward()) == (True, False)
    assert alive(lambda loss: None) == (True, False)


@pytest.mark.parametrize("prefired", [False, True])
def test_what_is_kept_is_freed_by_clear(engine, gc_off, prefired):
    """Rule 11: the graph lives on, and what the policy kept does not; a later backward runs it again."""
    kept = []

    def region(a, b):
        y = a @ b
        kept.append(StorageWeakRef(y.untyped_storage()))
        return y.sin().exp()

    x, w = matrices()
    with recompute_session_ctx("session", retain_on_unpack=True), recompute_handle_collector_ctx() as handles:
        loss = engine.checkpoint(region, x, w, policy_fn=keep(MM)).sum()
    if prefired:
        recompute_handle(handles[0], "session")
    clear_recompute_session("session")
    assert kept[0].expired()
    loss.backward()
    torch.testing.assert_close((x.grad, w.grad), torch.autograd.grad((x @ w).sin().exp().sum(), (x, w)), rtol=0, atol=0)


def test_a_list_keeps_what_it_names(engine):
    """Rule 16: ``create_selective_checkpoint_contexts`` takes torch's arguments."""
    x, w = matrices()
    out = engine.checkpoint(mlp, x, w, context_fn=partial(create_selective_checkpoint_contexts, [MM]))
    assert operators_of(out.sum().backward)[MM] == 4  # backward's own
    assert operators_of(lambda: None) == {}


@pytest.mark.parametrize("entry", [aten.mm, torch.mm, "mm", None], ids=str)
def test_a_list_with_something_else_in_it_is_refused(entry):
    """Rule 19: an entry that is no overload is named, with what would be one."""
    with pytest.raises(ValueError, match="policy_fn_or_list") as refused:
        create_selective_checkpoint_contexts([MM, entry])
    assert ("mm.default" in str(refused.value)) == (entry is aten.mm)


def test_a_policy_that_is_neither_function_nor_list_is_refused():
    """Rule 19: as in torch, a TypeError."""
    with pytest.raises(TypeError, match="policy_fn_or_list"):
        create_selective_checkpoint_contexts(MM if not callable(MM) else 3)


def test_two_calls_that_share_one_pair_of_contexts_do_not_mix(engine):
    """Rule 16: a pair serves one call; the second is refused, or right, and never gets what the first kept."""
    pair = create_selective_checkpoint_contexts([aten.sin.default])
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)

    def region(t):
        return t.sin().exp()

    def both():
        out = sum(engine.checkpoint(region, t, context_fn=lambda: pair) for t in (x, y))
        return torch.autograd.grad(out.sum(), [x, y])

    want = torch.autograd.grad((region(x) + region(y)).sum(), [x, y])
    try:
        got = both()
    except (RuntimeError, ValueError):
        return
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_torchs_own_contexts_work_once(same_grads):
    """Rule 16: torch's contexts as ``context_fn`` give torch's result in one backward."""

    def program(call):
        x, w = matrices()
        call(mlp, x, w).sum().backward()
        return x.grad, w.grad

    same_grads(program, context_fn=partial(torch_checkpoint.create_selective_checkpoint_contexts, [MM]))


def test_torchs_own_contexts_keep_torchs_limits(engine):
    """Rule 16: a second backward and an overwritten value are torch's errors there."""
    x, w = matrices()
    context_fn = partial(torch_checkpoint.create_selective_checkpoint_contexts, [MM])
    out = engine.checkpoint(mlp, x, w, context_fn=context_fn).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        out.backward()
    with pytest.raises(RuntimeError, match="mutated"):
        engine.checkpoint(lambda a, b: (a @ b).relu_().sin(), x, w, context_fn=context_fn).sum().backward()


def test_a_policy_and_contexts_compose(engine):
    """Rule 16: contexts are entered in order, those of ``context_fn`` around the policy's, and left in reverse."""
    log = []

    class Log(TorchDispatchMode):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            log.append(f"{self.name} {func}")
            return func(*args, **(kwargs or {}))

    x, w = matrices()
    out = engine.checkpoint(
        lambda a, b: (a @ b).sin(), x, w, context_fn=lambda: (Log("forward"), Log("replay")), policy_fn=keep(MM)
    )
    out.sum().backward()
    # The policy's mode is innermost: an operator that it does not run never reaches the outer one.
    assert [line for line in log if "mm" in line] == ["forward aten.mm.default"]


def test_a_replay_that_runs_other_operators_is_refused(engine):
    """Rule 4: what was kept would be given to the wrong operator."""
    x, w = matrices()
    flip = []

    def region(a, b):
        return (a.cos() if flip else a.sin()) @ b

    out = engine.checkpoint(region, x, w, policy_fn=keep(MM))
    flip.append(True)
    with pytest.raises(CheckpointError, match=r"operator 0 of the replay is aten\.cos.*forward ran aten\.sin"):
        out.sum().backward()
    assert (x.grad, w.grad) == (None, None)


def test_a_replay_that_runs_more_operators_is_refused(engine):
    """Rule 4: beyond the end of what forward ran there is nothing to give."""
    x, w = matrices()
    more = []

    def region(a, b):
        y = a @ b
        for _ in more:
            y = y.cos()
        return y.sin()

    out = engine.checkpoint(region, x, w, policy_fn=keep(MM), early_stop=False)
    more.extend([1, 2])
    with pytest.raises(RuntimeError, match=r"aten\.cos"):
        out.sum().backward()
    assert (x.grad, w.grad) == (None, None)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("policy", ["products", "everything", "nothing"])
def test_weights_under_autocast(same_grads, policy, cached):
    """Rule 16: a cast that autocast remembers is missing in one of the two runs, whichever call came first."""

    def program(call):
        shared, own = nn.Linear(4, 4), nn.Linear(4, 4)
        x = torch.randn(3, 4, requires_grad=True)

        def region(t):
            return torch.tanh(own(torch.relu(shared(t))))

        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
            h = shared(x)
            h = call(region, h)
            h = call(lambda t: shared(t).tanh(), h)
            h = call(region, h)
        loss = h.float().square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad, shared.weight.grad, own.weight.grad, own.bias.grad

    same_grads(program, policy_fn=POLICIES[policy])


def test_backward_inside_autocast_with_a_policy(same_grads):
    """Rule 16: the replay may find a cast that forward made, or make one that forward found."""

    def program(call):
        layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(lambda t: torch.relu(layer(t)), x)
            out.float().sum().backward()
            layer.weight.grad, first = None, layer.weight.grad
            call(lambda t: torch.relu(layer(t)), x).float().sum().backward()
        return x.grad, first, layer.weight.grad

    same_grads(program, policy_fn=POLICIES["products"])


def test_nested_calls_with_policies(same_grads):
    """Rule 15: a policy around, a policy inside, and both."""
    for outer, inner in ((keep(MM), None), (None, keep(MM)), (keep(MM), keep_all)):

        def program(call, outer=outer, inner=inner):
            x, w = matrices()
            run = partial(call, policy_fn=outer) if isinstance(call, partial) else call
            nested = partial(call, policy_fn=inner) if isinstance(call, partial) else call
            loss = run(lambda a, b: nested(mlp, (a @ b).sin(), b).exp(), x, w).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            return x.grad, w.grad

        same_grads(program, debug=False)


def test_gradients_inside_a_function_with_a_policy(same_grads):
    """Rule 16: the function differentiates its own energy, and its products are kept."""

    def program(call):
        x, w = matrices()

        def field(position, weight):
            energy = (position @ weight).tanh().sum()
            (force,) = torch.autograd.grad(energy, position, create_graph=True)
            return energy, force

        energy, force = call(field, x, w)
        (energy + force.square().sum()).backward()
        return x.grad, w.grad

    same_grads(program, policy_fn=keep(MM))


def test_double_backward_with_a_policy(same_grads):
    """Rule 16: every pass has a replay, and every replay reads what is kept."""

    def program(call):
        x, w = matrices()
        first = torch.autograd.grad(call(mlp, x, w).square().sum(), [x, w], create_graph=True)
        sum(grad.square().sum() for grad in first).backward()
        return first, x.grad, w.grad

    same_grads(program, policy_fn=keep(MM))


def test_a_replay_that_failed_half_way_does_not_spoil_the_next(same_grads):
    """Rule 11: the walk over what is kept begins anew."""

    def program(call):
        x, w = matrices()
        fail = []

        def region(a, b):
            y = (a @ b).sin()
            if fail:
                raise KeyError("half way")
            return (y @ b).exp()

        loss = call(region, x, w).sum()
        fail.append(True)
        if isinstance(call, partial):
            with pytest.raises(KeyError):
                loss.backward()
        fail.clear()
        loss.backward()
        return x.grad, w.grad

    same_grads(program, policy_fn=keep(MM))


def test_higher_order_operators_pass_a_policy(same_grads):
    """Rule 16: an operator that is no overload reaches the policy as it is."""
    from torch._higher_order_ops.wrap import wrap

    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return op is MM

    def program(call):
        x, w = matrices()
        call(lambda a, b: wrap(torch.matmul, a, b).sin(), x, w).sum().backward()
        return x.grad, w.grad

    same_grads(program, policy_fn=policy)
    assert asked


def test_custom_functions_inside_a_kept_region(same_grads):
    """Rule 16: operators inside a custom Function are operators like others."""

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            y = a @ b
            ctx.save_for_backward(a, b, y)
            return y.sin()

        @staticmethod
        def backward(ctx, grad):
            a, b, y = ctx.saved_tensors
            grad = grad * y.cos()
            return grad @ b.t(), a.t() @ grad

    def program(call):
        x, w = matrices()
        loss = call(lambda a, b: Mixed.apply(Mixed.apply(a, b), b), x, w).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad, w.grad

    same_grads(program, policy_fn=keep(MM))


def test_gradients_inside_a_nested_call_of_a_function_with_a_policy(same_grads):
    """Rule 15: the inner call replays itself in the middle of both runs of the outer; that is none of outer's walk."""

    def program(call):
        x, w = matrices()
        nested = partial(call, policy_fn=None) if isinstance(call, partial) else call

        def inner(a, b):
            (grad,) = torch.autograd.grad(a.sin().square().sum(), a, create_graph=True)
            return (grad @ b).exp()

        call(lambda a, b: nested(inner, a * 2, b).sin(), x, w).sum().backward()
        return x.grad, w.grad

    same_grads(program, policy_fn=keep(MM))


def test_nothing_grows_with_the_number_of_replays_under_hooks_that_copy(engine):
    """Rule 12: every replay unpacks the kept value anew, and forgets it."""
    made = []

    def unpack(packed):
        made.append(packed.clone())
        return made[-1]

    x = torch.randn(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
        out = engine.checkpoint(lambda t: (t @ t).sin().exp(), x, policy_fn=lambda *_, **__: True).sum()
    sizes = []
    for _ in range(4):
        out.backward(retain_graph=True)
        made.clear()
        gc.collect()
        sizes.append(sum(len(value) for value in gc.get_objects() if type(value) is dict and _is_of_kept(value)))
    assert sizes[0] == sizes[-1]


def _is_of_kept(value):
    from regrow._core.kept import KeptTensor

    return any(type(item) is list and item and isinstance(item[0], KeptTensor) for item in value.values())


@pytest.mark.parametrize("respects", [True, False])
def test_torchs_own_contexts_are_told_whether_to_respect_hooks(engine, same, respects):
    """Rule 16: they ask from torch 2.14 on; before, what they keep never passes through hooks around the call."""
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    def region(a, b):
        return (a @ b).sin().exp()

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    want = torch.autograd.grad(region(x, w).sum(), [x, w])
    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [MM])
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = engine.checkpoint(region, x, w, context_fn=contexts, respect_saved_tensors_hooks=respects)
    assert packed == [(3, 4), (4, 5)] + (
        [(3, 5)] if respects and hasattr(torch_checkpoint, "_current_user_saved_tensors_hooks") else []
    )
    same(torch.autograd.grad(out.sum(), [x, w]), want)


def test_torchs_own_contexts_inside_a_call_do_not_take_its_hooks_for_a_users(engine, same, recwarn):
    """Rule 16: the checkpoint inside is torch's; it would warn, and pack what it keeps a second time."""

    def region(a, b):
        contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [MM])
        inner = torch.utils.checkpoint.checkpoint
        return inner(lambda a, b: (a @ b).sin().exp(), a, b, use_reentrant=False, context_fn=contexts).sin()

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    want = torch.autograd.grad((x @ w).sin().exp().sin().sum(), [x, w])
    engine.checkpoint(region, x, w).sum().backward()
    same((x.grad, w.grad), want)
    assert not recwarn.list
