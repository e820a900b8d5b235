"""Reported situations: a policy decides, operator by operator, what is kept."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from regrow import create_selective_checkpoint_contexts

pytestmark = pytest.mark.only("hooks", because="the other engine has no selective checkpointing")

MM = torch.ops.aten.mm.default
TANH = torch.ops.aten.tanh.default


def keeping(policy):
    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


class CountOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func] = self.seen.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def keep_mm(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is MM else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.case("H1")
def test_a_kept_operator_runs_once_and_the_others_twice(engine, same):
    """Rule 16: the count of operators shows the policy, the gradients show that it was right."""
    w = torch.randn(4, 4, requires_grad=True)

    def region(t):
        return ((t @ w).tanh() @ w).tanh()

    def run(call):
        x = torch.ones(2, 4).requires_grad_()
        w.grad = None
        with CountOperators() as count:
            call(region, x).sum().backward()
        return (x.grad, w.grad), count.seen

    want, plain = run(lambda function, x: function(x))
    again, full = run(engine.checkpoint)
    by_policy, kept = run(partial(engine.checkpoint, **keeping(keep_mm)))
    by_list, listed = run(partial(engine.checkpoint, **keeping([MM])))
    assert plain[MM] == kept[MM] == listed[MM] == full[MM] - 2
    assert (plain[TANH], full[TANH], kept[TANH]) == (2, 4, 4)
    same([again, by_policy, by_list], [want] * 3)


@pytest.mark.case("H2")
def test_a_kept_result_that_is_overwritten_keeps_what_it_was(same_grads):
    """Rule 16: ``selu_(x @ w)`` overwrites the kept product before the replay reads it."""

    def program(call):
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        call(lambda a, b: torch.selu_(a @ b) * 2, x, w).sum().backward()
        return x.grad, w.grad

    same_grads(program, **keeping([MM]))


@pytest.mark.case("H3")
def test_a_second_backward_over_a_retained_graph_reads_what_is_kept_again(engine):
    """Rule 16: kept results belong to the call and are read by every replay."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def region(a):
        return (a @ w).sin().exp()

    loss = engine.checkpoint(region, x, **keeping([MM])).sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    (want,) = torch.autograd.grad(region(x).sum(), x)
    torch.testing.assert_close((once, x.grad), (want, 2 * want))


@pytest.mark.case("H4")
def test_one_weight_in_two_calls_under_autocast(same_grads):
    """Rule 16: the second call finds the cast weight in autocast's cache, its replay does not."""

    def program(call):
        layer = torch.nn.Linear(6, 6, bias=False)
        x = (torch.arange(12.0).view(2, 6) / 9).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = call(lambda t: torch.relu(layer(t)), x)
            h = call(lambda t: torch.relu(layer(t)), h)
        h.float().square().sum().backward()
        return x.grad, layer.weight.grad

    same_grads(program, **keeping([MM]))


class Box:
    def __init__(self, value):
        self.value = value


@pytest.mark.case("H5")
def test_kept_results_pass_through_surrounding_saved_tensor_hooks(engine, same):
    """Rule 16: an offloading hook sees what the call keeps and its input, and nothing else."""
    w = torch.randn(7, 11, requires_grad=True)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return Box(tensor.detach().clone())

    def unpack(box):
        unpacked.append(tuple(box.value.shape))
        return box.value

    def region(t):
        return (t @ w).sin().exp()

    x = torch.randn(5, 7, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = engine.checkpoint(region, x, **keeping([MM]))
    out.sum().backward()
    got, x.grad = x.grad, None
    region(x).sum().backward()
    same(got, x.grad)
    assert sorted(packed) == [(5, 7), (5, 11)]
    assert (5, 11) in unpacked
