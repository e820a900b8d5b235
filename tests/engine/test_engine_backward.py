"""Whatever backward looks like: partial, repeated, of second order, inside forward, overlapping, from any thread."""

import threading

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import nn

# Forward-mode differentiation in torch still compiles scripts.
scripted = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def mlp(x, w):
    return torch.tanh(torch.tanh(x @ w) @ w)


def leaves():
    return torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def test_one_backward_makes_one_replay(engine, counted):
    """Rule 6: forward and one more execution, however many tensors were saved."""
    region, (x, w) = counted(mlp), leaves()
    engine.checkpoint(region, x, w).sum().backward()
    assert region.runs == 2


@pytest.mark.only(
    "hooks",
    because="each call of the other engine adds up what it captures or shares by itself, which may round differently",
)
def test_one_backward_over_many_calls_replays_each_once(same_grads, counted):
    """Rule 6: a chain of calls, and a call used by two branches."""
    regions = [counted(mlp) for _ in range(4)]

    def program(call):
        for region in regions:
            region.runs = 0
        x, w = leaves()
        h = x
        for region in regions[:3]:
            h = call(region, h, w)
        (h.sum() + call(regions[3], h, w).square().sum()).backward()
        return x.grad, w.grad

    same_grads(program)
    assert [region.runs for region in regions] == [2, 2, 2, 2]


PARTIAL = {
    "input alone": lambda loss, x, w: torch.autograd.grad(loss, [x]),
    "weight alone": lambda loss, x, w: torch.autograd.grad(loss, [w]),
    "input then weight": lambda loss, x, w: (
        torch.autograd.grad(loss, [x], retain_graph=True) + torch.autograd.grad(loss, [w])
    ),
    "one group per parameter": lambda loss, x, w: (
        torch.autograd.grad(loss, [w], retain_graph=True)
        + torch.autograd.grad(loss, [x], retain_graph=True)
        + torch.autograd.grad(loss, [w])
    ),
}


@pytest.mark.parametrize("way", PARTIAL)
def test_partial_gradients(same_grads, way):
    """Rule 1: any selection of inputs, in any order, one after the other."""

    def program(call):
        x, w = leaves()
        return PARTIAL[way](call(mlp, x, w).square().sum(), x, w)

    same_grads(program)


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_backward_that_ends_inside_the_function(same_grads):
    """Rule 1: gradients of a tensor that the function made itself, read by a hook on it."""

    def program(call):
        x, w = leaves()
        inner = []

        def region(x, w):
            h = torch.tanh(x @ w)
            inner.append(h)
            return torch.tanh(h @ w)

        loss = call(region, x, w).square().sum()
        return torch.autograd.grad(loss, [inner[0]], retain_graph=True) + torch.autograd.grad(loss, [x])

    same_grads(program)


def test_gradients_of_each_output_apart(same_grads):
    """Rule 1: several outputs, each differentiated on its own."""

    def program(call):
        x, w = leaves()
        a, b = call(lambda x, w: ((x @ w).sin(), (x * 2).exp()), x, w)
        first = torch.autograd.grad(a.sum(), [x, w], retain_graph=True)
        second = torch.autograd.grad(b.sum(), [x], retain_graph=True)
        return first, second, torch.autograd.grad([a, b], [x, w], [torch.ones_like(a), torch.ones_like(b)])

    same_grads(program)


@pytest.mark.parametrize("passes", [2, 3])
def test_repeated_backward_over_a_retained_graph(same_grads, counted, passes):
    """Rule 6: each backward is right and replays once."""
    region = counted(mlp)

    def program(call):
        region.runs = 0
        x, w = leaves()
        loss = call(region, x, w).square().sum()
        for index in range(passes):
            loss.backward(retain_graph=index < passes - 1)
        return x.grad, w.grad

    same_grads(program)
    assert region.runs == 1 + passes


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
def test_backward_over_a_freed_graph_is_refused_as_by_plain_autograd(engine):
    """Rule 1: the second backward without ``retain_graph`` is autograd's own error."""
    x, w = leaves()
    loss = engine.checkpoint(mlp, x, w).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.only("hooks", because="gradients of the other engine have no graph")
def test_double_backward(same_grads):
    """Rule 1: gradients of gradients, and of those."""

    def program(call):
        x, w = leaves()
        loss = call(mlp, x, w).square().sum()
        first = torch.autograd.grad(loss, [x, w], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, w], create_graph=True)
        sum(g.sin().sum() for g in second).backward()
        return first, second, x.grad, w.grad

    same_grads(program)


@pytest.mark.only("hooks", because="gradients of the other engine have no graph")
def test_gradients_of_second_order_are_those_of_finite_differences(engine):
    """Rule 1: torch's own numerical checks, batched gradients and forward mode included."""
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    w = torch.randn(3, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: engine.checkpoint(mlp, x, w), (x, w), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, w: engine.checkpoint(mlp, x, w), (x, w))


@pytest.mark.only("hooks", because="gradients of the other engine have no graph")
@scripted
def test_forward_mode_over_reverse_mode(same_grads):
    """Rule 1: the tangents of a dual number are values like others."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        with fwd.dual_level():
            out = call(lambda t: t.sin().exp(), fwd.make_dual(x, torch.ones(3)))
            tangent = fwd.unpack_dual(out).tangent
            tangent.sum().backward()
        return tangent.detach(), x.grad

    same_grads(program)


@pytest.mark.only("hooks", because="gradients of the other engine have no graph")
@scripted
def test_forward_mode_that_has_ended_before_backward_is_refused(engine):
    """Rule 4: a replay without the tangents saves fewer tensors, so it is no replay."""
    x = torch.randn(3, requires_grad=True)
    with fwd.dual_level():
        out = engine.checkpoint(lambda t: t.sin().exp(), fwd.make_dual(x, torch.ones(3)))
        tangent = fwd.unpack_dual(out).tangent
    with pytest.raises(RuntimeError, match="forward saved 6 tensors, the replay saved 2"):
        tangent.sum().backward()
    assert x.grad is None


INSIDE = {
    "graph kept": {"retain_graph": True},
    "graph freed": {},
    "of second order": {"create_graph": True},
}


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("way", INSIDE)
def test_gradients_inside_the_function(same_grads, way, early_stop):
    """Rule 1: the function differentiates what it just computed, and goes on with the result."""

    def program(call):
        x, w = leaves()

        def region(x, w):
            h = torch.tanh(x @ w)
            (inner,) = torch.autograd.grad(h.square().sum(), x, **INSIDE[way])
            return (x.cos() * inner).exp() + (h if way != "graph freed" else 0)

        call(region, x, w).sum().backward()
        return x.grad, w.grad

    same_grads(program, early_stop=early_stop)


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_two_gradients_inside_the_function(same_grads):
    """Rule 1: a replay that is itself asked for gradients serves them from its own graph."""

    def program(call):
        x = torch.randn(4, requires_grad=True)

        def region(x):
            y = x.sin()
            (a,) = torch.autograd.grad(y.cos().sum(), x, create_graph=True)
            (b,) = torch.autograd.grad((a * y).sum(), x, create_graph=True)
            return a * b + y

        call(region, x).sum().backward()
        return x.grad

    same_grads(program)


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_accumulating_inside_the_function_is_left_to_plain_rules(same_grads):
    """Rule 1: a detached inner loop of optimisation, with ``backward`` and ``.grad``, comes out the same."""

    def program(call):
        x = torch.randn(4, requires_grad=True)

        def region(t):
            guess = torch.zeros(4, requires_grad=True)
            for _ in range(2):
                guess.grad = None
                (guess - t.detach()).square().sum().backward()
                guess = (guess - 0.3 * guess.grad).detach().requires_grad_()
            return (t * guess.detach()).sin()

        call(region, x).sum().backward()
        return x.grad

    same_grads(program)


class Twice(torch.autograd.Function):
    """Reads its saved tensors several times, one at a time."""

    @staticmethod
    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx, grad):
        assert len(ctx.saved_tensors) == 2
        x = ctx.saved_tensors[0]
        y = ctx.saved_tensors[1]
        return grad * (2 * x * x + y)


@pytest.mark.parametrize("retain", [False, True])
def test_reading_twice_costs_one_more_replay_at_most(same_grads, counted, retain):
    """Rule 14: two such nodes, each reading three times, in one backward."""
    region = counted(lambda t: Twice.apply(Twice.apply(t.sin()).cos()))

    def program(call):
        region.runs = 0
        x = torch.randn(5, requires_grad=True)
        call(region, x).sum().backward(retain_graph=retain)
        return x.grad

    same_grads(program)
    assert 2 <= region.runs <= 3


class Overlap(torch.autograd.Function):
    """The identity; its backward starts another backward meanwhile."""

    @staticmethod
    def forward(ctx, x, start):
        ctx.start = start
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.start()
        return grad, None


@pytest.mark.only("hooks", because="gradients of the other engine have no graph")
@pytest.mark.parametrize("creates", [False, True])
def test_a_backward_inside_a_backward_over_the_same_call(same_grads, creates):
    """Rule 6: both have a replay of their own, and neither takes the other's values."""

    def program(call):
        x, w = leaves()
        inner = []

        def start():
            if not inner:
                inner.append(None)
                with torch.enable_grad():
                    inner[0] = torch.autograd.grad(out.sum(), [x, w], retain_graph=True, create_graph=creates)

        def region(x, w):
            return torch.tanh(Overlap.apply(torch.tanh(x @ w), start) @ w)

        out = call(region, x, w)
        out.square().sum().backward(retain_graph=True)
        return inner, x.grad, w.grad

    same_grads(program)


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_a_backward_started_by_a_hook_in_the_middle_of_another(same_grads):
    """Rule 6: the hook is on a tensor inside the function, so half of the replay is read and half is not."""

    def program(call):
        x, w = leaves()
        inner = []

        def hook(grad):
            if not inner:
                inner.append(None)
                with torch.enable_grad():
                    inner[0] = torch.autograd.grad(out.sum(), [x, w], retain_graph=True)

        def region(x, w):
            h = torch.tanh(x @ w)
            h.register_hook(hook)
            return torch.tanh(h @ w).exp()

        out = call(region, x, w)
        out.square().sum().backward(retain_graph=True)
        return inner, x.grad, w.grad

    same_grads(program)


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
def test_reads_outside_backward(same_grads, counted):
    """Rule 6: a saved tensor that is looked at from outside is the plain one, and backward works afterwards."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        out = call(lambda t: t.sin().cos(), x)
        looked = [out.grad_fn._saved_self.detach(), out.grad_fn._saved_self.detach()]
        out.sum().backward()
        return looked, x.grad

    same_grads(program)


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
def test_reads_outside_backward_hold_nothing(engine, track, gc_off):
    """Rule 6: the replay of such a read brings back the one value, and keeps nothing."""
    x = torch.randn(3, requires_grad=True)
    out = engine.checkpoint(lambda t: track(track(t.sin()).cos()).exp(), x)
    first, _second = out.grad_fn._saved_result.shape, out.grad_fn.next_functions[0][0]._saved_self.shape
    assert first == (3,)
    assert track.alive == 0


def test_backward_on_any_thread(same_grads, anywhere, counted):
    """Rule 1: the caller's thread, a bare one, and one of autograd's own pool give the same gradients."""
    starter = threading.get_ident()
    threads = []

    def program(call):
        x, w = leaves()

        def region(x, w):
            threads.append(threading.get_ident())
            return torch.dropout(mlp(x, w), 0.5, True).sin()

        loss = call(region, x, w).sum()
        anywhere(loss.backward)
        return x.grad, w.grad

    same_grads(program)
    assert threads[:2] == [starter, starter]  # plain and forward; the replay is where backward is
    assert len(threads) == 3


def test_the_pool_thread_is_another_thread(on_pool_thread, on_thread):
    """Rule 6: what the tests call a pool thread, or a bare one, is not the caller's."""
    assert threading.get_ident() not in (on_pool_thread(threading.get_ident), on_thread(threading.get_ident))


def test_two_threads_over_one_call_at_once(engine, same):
    """Rule 13: a replay runs under the lock of its frame, so two backwards on two threads do not disturb each other."""
    x, w = leaves()
    want = torch.autograd.grad(mlp(x, w).sum(), [x, w])
    out = engine.checkpoint(mlp, x, w).sum()
    barrier, got = threading.Barrier(2, timeout=60), {}

    def work(name):
        barrier.wait()
        got[name] = torch.autograd.grad(out, [x, w], retain_graph=True)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    same([got["a"], got["b"]], [want, want])


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_hooks_of_tensors_inside_the_function_fire_once(same_grads):
    """Rule 1: the replay registers them on a graph of its own, which no backward runs over."""

    def program(call):
        x, w = leaves()
        fired = []

        def region(x, w):
            h = torch.tanh(x @ w)
            h.register_hook(lambda grad: fired.append(grad.clone()))
            h.register_hook(lambda grad: grad * 2)
            return torch.tanh(h @ w)

        call(region, x, w).sum().backward()
        return fired, x.grad, w.grad

    assert len(same_grads(program)[0]) == 1


def test_full_backward_hooks_of_submodules_fire_once(same_grads):
    """Rule 1: module hooks that see gradients are part of the graph of forward."""

    def program(call):
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        fired = []
        net[1].register_full_backward_hook(lambda module, into, out: fired.append((into, out)))
        net[2].register_full_backward_pre_hook(lambda module, out: fired.append(out))
        x = torch.randn(3, 4, requires_grad=True)
        call(net, x).square().sum().backward()
        return fired, x.grad, [p.grad for p in net.parameters()]

    same_grads(program)


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
def test_retained_gradients_of_tensors_inside_the_function(same_grads):
    """Rule 1: ``retain_grad`` on a tensor of forward is served by the one backward."""

    def program(call):
        x, w = leaves()
        inner = []

        def region(x, w):
            h = torch.tanh(x @ w)
            h.retain_grad()
            inner.append(h)
            return torch.tanh(h @ w)

        call(region, x, w).sum().backward()
        return inner[0].grad, x.grad

    same_grads(program)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode(same_grads):
    """Rule 1: anomaly detection around forward, backward and replay changes nothing."""

    def program(call):
        x, w = leaves()
        with torch.autograd.detect_anomaly():
            call(mlp, x, w).sum().backward()
        return x.grad, w.grad

    same_grads(program)


def test_gradients_accumulate_over_micro_batches(same_grads):
    """Rule 1: several graphs alive at once, backward in another order than forward."""

    def program(call):
        w = torch.randn(4, 4, requires_grad=True)
        batches = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
        losses = [call(lambda x: torch.dropout(mlp(x, w), 0.3, True).exp(), x).sum() for x in batches]
        for index in (1, 0, 2):
            losses[index].backward()
        return w.grad, [x.grad for x in batches]

    same_grads(program)


@pytest.mark.only(
    "hooks",
    because="each call of the other engine adds up what it captures or shares by itself, which may round differently",
)
def test_a_backward_that_fails_elsewhere_can_be_repeated(same_grads):
    """Rule 11: an exception between two calls leaves the graph as it was."""

    def program(call):
        x, w = leaves()
        fail = [True]

        def hook(grad):
            if fail:
                raise KeyError("once")

        h = call(mlp, x, w)
        h.register_hook(hook)
        loss = call(mlp, h, w).sum()
        with pytest.raises(KeyError):
            loss.backward(retain_graph=True)
        fail.clear()
        x.grad = w.grad = None
        loss.backward()
        return x.grad, w.grad

    same_grads(program)


@pytest.mark.only("hooks", because="gradients of the other engine have no graph")
def test_a_node_that_unpacks_under_create_graph_reads_values_with_their_history(same_grads):
    """Rule 1: products of saved outputs have second derivatives through those outputs."""

    def program(call):
        x = torch.linspace(0.1, 1, 5).requires_grad_()
        (first,) = torch.autograd.grad(call(lambda t: t.exp().sigmoid().tanh(), x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first.detach(), second

    same_grads(program)


def test_an_optimiser_that_steps_in_the_middle_of_backward(same_grads):
    """Rule 4: parameters that change as soon as their gradient is there are no change under a replay's feet."""

    def program(call):
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def update(parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for parameter in layers.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        x = torch.randn(2, 4, requires_grad=True)
        for _ in range(2):
            h = call(lambda t: layers[1](layers[0](t).tanh()).tanh(), x)
            call(nn.functional.linear, h, layers[2].weight, layers[2].bias).exp().sum().backward()
        return x.grad, list(layers.parameters())

    same_grads(program)


def test_one_module_used_twice_in_a_call(same_grads):
    """Rule 1: batch norm updates what it saved; the second use is no overwrite of the first."""

    def program(call):
        norm = nn.BatchNorm1d(4)
        x = torch.randn(3, 4, requires_grad=True)
        call(lambda t: norm(norm(t).tanh()).sin(), x).square().sum().backward()
        return x.grad, norm.weight.grad

    same_grads(program)
