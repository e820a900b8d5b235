"""While torch.compile or export traces, a call is torch's own checkpoint: one graph, the same gradients."""

from functools import partial

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs

import regrow
from regrow import policies

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

MM = torch.ops.aten.mm.default


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def region(x, w):
    return torch.tanh(torch.tanh(x @ w) @ w)


def keep_products(ctx, op, *args, **kwargs):
    return op is MM


OPTIONS = {
    "defaults": {},
    "no early stop": {"early_stop": False},
    "random numbers not preserved": {"preserve_rng_state": False},
    "no check": {"determinism_check": "none"},
    "policy": {"policy_fn": keep_products},
    "policy as a value": {"policy_fn": policies.keep_matmuls() | policies.keep_random()},
    "policy that counts": {"policy_fn": policies.keep_matmuls(every=2)},
    "contexts of a policy": {"context_fn": policies.keep_matmuls(every=2).context_fn},
    "hooks not respected": {"respect_saved_tensors_hooks": False},
}


def grads(function, x, w):
    return torch.autograd.grad(function(x, w).square().sum(), [x, w])


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_compiled_call_is_one_graph_with_the_plain_gradients(engine, same, backend, options):
    """Rule 22: no graph break, with every option."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def function(x, w):
        return engine.checkpoint(region, x.sin(), w, **OPTIONS[options]).exp()

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    torch.testing.assert_close(grads(compiled, x, w), grads(lambda x, w: region(x.sin(), w).exp(), x, w))


INLINE = {
    "family": lambda: policies.keep_matmuls(every=2),
    "operators": lambda: policies.keep(torch.ops.aten.bmm.default, MM, every=2),
    "function": lambda: policies.keep_where(keep_products),
    "combination": lambda: (policies.keep_matmuls(every=2) | policies.keep(MM)) - policies.keep_random(),
}


@pytest.mark.only("hooks", because="the other engine takes no policy")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["policy_fn", "context_fn"])
@pytest.mark.parametrize("policy", INLINE)
def test_a_policy_made_inside_the_compiled_function(engine, policy, how, backend):
    """Rule 22: made while tracing as well as before, without a graph break."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    make = INLINE[policy]

    def function(x, w):
        options = {"policy_fn": make()} if how == "policy_fn" else {"context_fn": make().context_fn}
        return engine.checkpoint(region, x.sin(), w, **options).exp()

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    torch.testing.assert_close(grads(compiled, x, w), grads(lambda x, w: region(x.sin(), w).exp(), x, w))


def test_the_graph_holds_torchs_checkpoint(engine):
    """Rule 22: what torch's tracer knows, with torch's own words for regrow's options."""
    graphs = {}
    for name, call in (("regrow", engine.checkpoint), ("torch", torchs)):
        torch._dynamo.reset()
        recorded = EagerAndRecordGraphs()
        compiled = torch.compile(lambda x, w, call=call: call(region, x, w), backend=recorded, fullgraph=True)
        compiled(torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))
        (graph,) = recorded.graphs
        graphs[name] = [(node.op, str(node.target), dict(node.kwargs)) for node in graph.graph.nodes]
    assert graphs["regrow"] == graphs["torch"]
    assert any("checkpoint" in target for _, target, _ in graphs["regrow"])


def torchs(function, *args):
    return torch_checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        determinism_check="default",
        debug=False,
        early_stop=True,
    )


def test_keywords_of_the_function_survive(engine, same):
    """Rule 22: the function's own keywords are the function's."""

    def scaled(x, *, scale, shift=None):
        return (x * scale).sin() + (0 if shift is None else shift)

    x, shift = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    compiled = torch.compile(
        lambda x, shift: engine.checkpoint(scaled, x, scale=2.0, shift=shift), backend="eager", fullgraph=True
    )
    got = torch.autograd.grad(compiled(x, shift).sum(), [x, shift])
    same(got, torch.autograd.grad(scaled(x, scale=2.0, shift=shift).sum(), [x, shift]))


def test_a_compiled_module_with_wrapped_parts(same):
    """Rule 22: wrapped modules trace as modules do."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2))
    x = torch.randn(3, 4, requires_grad=True)
    want = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
    regrow.apply_checkpointing(net, lambda name, module: name == "1")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x).square().sum(), [x, *net.parameters()]), want)
    assert counter.frame_count == 1


def test_a_decorated_function_is_traced(engine, same):
    """Rule 22: the decorator form too."""

    @engine.checkpoint(early_stop=False)
    def block(x):
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda t: block(t) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad((x.sin().exp() * 2).sum(), x)
    )


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
def test_a_policy_has_its_effect_in_the_compiled_backward(engine):
    """Rule 22: kept products are not in the backward graph, replayed ones are."""
    kept = products_of_backward(lambda x, w: engine.checkpoint(region, x, w, policy_fn=keep_products))
    assert kept < products_of_backward(lambda x, w: engine.checkpoint(region, x, w))


def products_of_backward(call):
    """How many matrix products the compiled backward of a call computes."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    torch._dynamo.reset()
    seen = []

    def count(graph, inputs):
        seen.append(sum(node.target is MM for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    torch.compile(call, backend=backend, fullgraph=True)(x, w).sum().backward()
    return seen[0]


@pytest.mark.only("hooks", because="the other engine takes no contexts")
def test_contexts_of_a_policy_have_its_effect_too(engine):
    """Rule 22: regrow's contexts are torch's there, as configurations pass them."""
    contexts = partial(regrow.create_selective_checkpoint_contexts, keep_products)
    kept = products_of_backward(lambda x, w: engine.checkpoint(region, x, w, context_fn=contexts))
    assert kept < products_of_backward(lambda x, w: engine.checkpoint(region, x, w))


class Around(nn.Module):
    """A compiled module with eager code around it, which counts its runs."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.runs = inner, 0

    def forward(self, x):
        self.runs += 1
        return self.inner(x.sin()).exp()


def layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.only("hooks", because="the other engine takes whole backwards")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"preserve_rng_state": False}], ids=str)
def test_a_compiled_module_inside_a_call_is_replayed_once(engine, same, backend, options):
    """Rule 22: forward and replay run the compiled code."""
    x, plain = torch.randn(3, 4, requires_grad=True), layers()
    want = torch.autograd.grad(plain(x.sin()).exp().sum(), [x, *plain.parameters()])
    around = Around(torch.compile(plain, backend=backend, fullgraph=True))
    got = torch.autograd.grad(engine.checkpoint(around, x, **options).sum(), [x, *plain.parameters()])
    same(got, want)
    assert around.runs == 2


@pytest.mark.only("hooks", because="the other engine takes no policy")
def test_a_policy_sees_the_operators_of_a_compiled_module(engine, same):
    """Rule 22: torch compiles nothing under a dispatch mode, so the module runs as written."""
    x, plain, seen = torch.randn(3, 4, requires_grad=True), layers(), []

    def policy(ctx, op, *args, **kwargs):
        seen.append(op)
        return op is torch.ops.aten.addmm.default

    want = torch.autograd.grad(plain(x.sin()).exp().sum(), [x, *plain.parameters()])
    around = Around(torch.compile(plain, backend="aot_eager"))
    got = torch.autograd.grad(engine.checkpoint(around, x, policy_fn=policy).sum(), [x, *plain.parameters()])
    same(got, want)
    assert torch.ops.aten.addmm.default in seen


@pytest.mark.only("hooks", because="the other engine gives gradients of parameters by accumulation")
def test_a_compiled_module_in_a_session(engine, same):
    """Rules 9 and 22: prefire, dx and dw share one replay of the compiled code."""
    x, plain = torch.randn(3, 4, requires_grad=True), layers()
    weights = list(plain.parameters())
    want = torch.autograd.grad(plain(x.sin()).exp().sum(), [x, *weights])
    around = Around(torch.compile(plain, backend="aot_eager", fullgraph=True))
    with regrow.recompute_handle_collector_ctx() as handles:
        loss = engine.checkpoint(around, x).sum()
    regrow.recompute_handle(handles[0], "mine")
    with regrow.recompute_session_ctx("mine", retain_on_unpack=True):
        dx = torch.autograd.grad(loss, x, retain_graph=True)
    with regrow.recompute_session_ctx("mine"):
        dw = torch.autograd.grad(loss, weights)
    regrow.clear_recompute_session("mine")
    same([*dx, *dw], list(want))
    assert around.runs == 2


@pytest.mark.only("hooks", because="the other engine takes whole backwards")
def test_a_compiled_region_runs_once(engine, same):
    """Rules 22 and 28: what is compiled may be what is not replayed."""
    x, plain = torch.randn(3, 4, requires_grad=True), layers()
    around = Around(torch.compile(plain, backend="aot_eager", fullgraph=True))

    def function(x):
        return regrow.save_region(around, x).sin()

    want = torch.autograd.grad(plain(x.sin()).exp().sin().sum(), [x, *plain.parameters()])
    same(torch.autograd.grad(engine.checkpoint(function, x).sum(), [x, *plain.parameters()]), want)
    assert around.runs == 1


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("verb", ["collector", "handle", "session"])
def test_scheduling_inside_a_compiled_function_is_refused(engine, verb, fullgraph):
    """Rule 22: calls leave no handles there, and that is said rather than found out."""
    with regrow.recompute_handle_collector_ctx() as handles:
        out = engine.checkpoint(torch.sin, torch.randn(3, requires_grad=True))  # noqa: F841 - keeps its graph

    def step(x):
        if verb == "handle":
            regrow.recompute_handle(handles[0], "mine")
            return x
        context = (
            regrow.recompute_handle_collector_ctx() if verb == "collector" else regrow.recompute_session_ctx("mine")
        )
        with context:
            return engine.checkpoint(torch.sin, x)

    with pytest.raises(RuntimeError, match=r"mark the function that schedules with torch\.compiler\.disable"):
        torch.compile(step, backend="eager", fullgraph=fullgraph)(torch.randn(3, requires_grad=True))


def test_scheduling_in_a_part_that_is_not_compiled(engine):
    """Rule 22: what the message says to do."""
    seen = []

    @torch.compiler.disable
    def scheduled(x):
        with regrow.recompute_handle_collector_ctx() as handles:
            out = engine.checkpoint(torch.sin, x)
        seen.append(len(handles))
        return out

    torch.compile(lambda x: scheduled(x.cos()).exp(), backend="eager")(torch.randn(3, requires_grad=True))
    assert seen == [1]


@pytest.mark.only("hooks", because="the other engine has no operator log")
def test_the_operator_log_is_left_out(engine):
    """Rule 22: torch refuses debug=True while it traces, where there is nothing to compare."""
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda t: engine.checkpoint(torch.sin, t, debug=True), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], x.cos())


@pytest.mark.only("hooks", because="the other engine takes no policy")
def test_a_policy_value_has_its_effect_in_the_compiled_backward(engine):
    """Rule 22: the more a policy keeps, the fewer products are left."""

    def products(**options):
        return products_of_backward(lambda x, w: engine.checkpoint(region, x, w, **options))

    one, two = policies.keep_matmuls(every=2), policies.keep_matmuls()
    assert products(policy_fn=two) < products(policy_fn=one) <= products()
    assert products(context_fn=two.context_fn) == products(policy_fn=two)


def test_nothing_is_said_while_tracing(engine, caplog):
    """Rule 22: a log call would break the graph."""
    compiled = torch.compile(lambda x: engine.checkpoint(torch.sin, x), backend="eager", fullgraph=True)
    compiled(torch.randn(3, requires_grad=True))
    assert [record for record in caplog.records if record.name.startswith("regrow")] == []


def test_export_sees_the_function(engine):
    """Rule 22: export traces through."""

    class Net(nn.Module):
        def forward(self, x):
            return engine.checkpoint(lambda t: t.sin().exp(), x)

    x = torch.randn(3)
    program = torch.export.export(Net(), (x,))
    torch.testing.assert_close(program.module()(x), x.sin().exp())


def test_make_fx_traces_forward_and_backward(engine):
    """Rule 22: a functional trace of a whole step, as AOTAutograd makes it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x):
        x = x.detach().requires_grad_()
        out = engine.checkpoint(lambda t: t.sin().exp(), x)
        return torch.autograd.grad(out.sum(), x)[0]

    x = torch.randn(3)
    traced = make_fx(step)(x)
    torch.testing.assert_close(traced(x), x.cos() * x.sin().exp())


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
def test_compiled_autograd_replays_eager_calls(engine):
    """Rule 1: forward was eager, backward is traced; nested calls in the replay are what they were in forward."""
    x = torch.linspace(0.1, 1, 4).requires_grad_()
    out = engine.checkpoint(lambda t: engine.checkpoint(lambda u: u.exp().tanh(), t.sin()).cos(), x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(x.sin().exp().tanh().cos().sum(), x)[0])


def test_eager_calls_before_and_after_a_trace_are_regrows(engine, counted):
    """Rule 22: the choice is made per call."""
    run = counted(torch.sin)
    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda t: engine.checkpoint(torch.sin, t), backend="eager")(x)
    with regrow.recompute_handle_collector_ctx() as handles:
        engine.checkpoint(run, x).sum().backward()
    assert (len(handles), run.runs) == (1, 2)
