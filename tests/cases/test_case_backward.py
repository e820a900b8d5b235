"""Reported situations: the many ways to ask for gradients."""

import pytest
import torch
from torch import nn


@pytest.mark.case("E1")
def test_each_backward_over_a_retained_graph_replays_once(engine, counted):
    """Rule 6: one backward, one replay; the gradients add up."""
    region = counted(lambda t, w: (t @ w).softmax(-1).log())
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    cotangents = [torch.randn(3, 4) for _ in range(3)]
    out = engine.checkpoint(region, x, w)
    runs = []
    for k, cotangent in enumerate(cotangents):
        out.backward(cotangent, retain_graph=k < 2)
        runs.append(region.runs)
    assert runs == [2, 3, 4]
    got = x.grad, w.grad
    x.grad = w.grad = None
    region(x, w).backward(sum(cotangents))
    torch.testing.assert_close(got, (x.grad, w.grad))


@pytest.mark.only("hooks", because="the other engine refuses a limited backward outside a scope")
@pytest.mark.case("E2")
def test_only_the_gradients_that_were_asked_for(engine, same):
    """Rule 1: backward(inputs=...) and autograd.grad touch what they name and nothing else."""
    net = nn.Sequential(nn.Linear(5, 5), nn.SiLU(), nn.Linear(5, 5))
    x, aside = torch.randn(2, 5, requires_grad=True), torch.randn(5, requires_grad=True)

    def region(t, extra):
        return net(t) * extra.exp()

    def loss():
        return engine.checkpoint(region, x, aside).square().sum()

    want = torch.autograd.grad(region(x, aside).square().sum(), [x, net[0].weight, aside, net[2].bias])

    loss().backward(inputs=[net[0].weight, aside])
    same((net[0].weight.grad, aside.grad), (want[1], want[2]))
    assert [t.grad for t in (x, net[2].bias, net[2].weight)] == [None, None, None]
    same(torch.autograd.grad(loss(), [x, net[2].bias]), (want[0], want[3]))
    unused = torch.randn(3, requires_grad=True)
    assert torch.autograd.grad(loss(), [unused], allow_unused=True) == (None,)


@pytest.mark.only(
    "hooks", because="forward of the other engine records no graph that could be differentiated or hooked inside it"
)
@pytest.mark.case("E3")
def test_a_force_field_differentiates_its_own_energy(same_grads):
    """Rule 1: autograd.grad inside the function, and gradients of what it gave."""

    def program(call):
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()

        def field(position):
            energy = net(position).sum()
            (force,) = torch.autograd.grad(energy, position, create_graph=True)
            return energy, -force

        position = torch.linspace(-1, 1, 12, dtype=torch.double).view(4, 3).requires_grad_()
        energy, force = call(field, position)
        (energy + force.square().sum()).backward()
        return position.grad, [p.grad for p in net[:2].parameters()]

    same_grads(program)


class Cube(torch.autograd.Function):
    """Asks how many tensors it saved before it reads them, as kernels do."""

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


@pytest.mark.case("E4")
def test_a_custom_backward_reads_its_saved_tensors_more_than_once(engine):
    """Rule 14: every read gives the right value."""
    x = torch.randn(6, requires_grad=True)
    engine.checkpoint(lambda t: Cube.apply(t.sin()), x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach().sin() ** 2 * x.detach().cos())


@pytest.mark.only("hooks", because="each call of the other engine that captures a parameter fires its hooks")
@pytest.mark.case("E5")
def test_hooks_of_a_shared_parameter_fire_once(engine):
    """Rule 1: one weight in two calls and outside them is one parameter with one gradient."""
    layer = nn.Linear(4, 4)
    log = []
    layer.weight.register_hook(lambda grad: log.append(("tensor", grad.clone())))
    layer.weight.register_post_accumulate_grad_hook(lambda p: log.append(("accumulated", p.grad.clone())))

    def fired(call):
        log.clear()
        layer.zero_grad()
        h = call(layer, torch.ones(2, 4)).tanh()
        h = call(lambda t: layer(t).sin() + t, h)
        layer(h).square().sum().backward()
        return list(log)

    want = fired(lambda function, *args: function(*args))
    got = fired(engine.checkpoint)
    assert [kind for kind, _ in got] == [kind for kind, _ in want] == ["tensor", "accumulated"]
    torch.testing.assert_close([grad for _, grad in got], [grad for _, grad in want])


@pytest.mark.case("E6")
def test_per_sample_gradients_with_vmap_of_grad(engine):
    """Rule 2: under torch.func transforms the call is plain, and right."""
    w, samples = torch.randn(3, 3), torch.randn(5, 3)

    def grads(call):
        def loss(weight, sample):
            return call(lambda t: torch.tanh(t @ weight), sample).square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(w, samples)

    torch.testing.assert_close(grads(engine.checkpoint), grads(lambda function, x: function(x)))


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
@pytest.mark.case("E7")
def test_nested_calls_run_once_more_per_level(same_grads):
    """Rule 15: a function runs in forward and once for each level down to it, at most."""
    runs = [0, 0, 0]

    def program(call):
        def level(depth):
            def run(t):
                runs[depth] += 1
                h = t.sin()
                return (call(level(depth + 1), h) if depth < 2 else h.exp()).cos() * t

            return run

        runs[:] = [0, 0, 0]
        x = torch.randn(5, requires_grad=True)
        call(level(0), x).sum().backward()
        return x.grad

    same_grads(program)
    assert runs[0] == 2
    assert 2 <= runs[1] <= 3
    assert 2 <= runs[2] <= 4
