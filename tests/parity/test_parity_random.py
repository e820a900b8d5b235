"""Random graphs, split at random into frames and into passes: whatever is done, the gradients are plain autograd's."""

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import regrow

QUICK = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class ReadTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, grad):
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        return grad * (first + second)


def scaled(a, b):
    with torch.no_grad():
        scale = 1 + b.abs().amax()
    return a / scale


def written_over(a, b):
    c = a.clone()
    c[0] = b[1]
    return c.mul_(0.5).add_(b)


def viewed(a, b):
    c = a * 1
    c.t()[1].add_(b[0].sin())
    return c


OPERATORS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b.t(),
    "mul": lambda a, b: a * b,
    "mm": lambda a, b: a @ b / 3,
    "div": lambda a, b: a / (1 + b * b),
    "sin": lambda a, b: a.sin(),
    "tanh": lambda a, b: a.tanh(),
    "exp": lambda a, b: a.tanh().exp(),
    "relu": lambda a, b: (a - b).relu(),
    "softmax": lambda a, b: a.softmax(0),
    "transpose": lambda a, b: a.t(),
    "roll": lambda a, b: a.reshape(9).roll(1).view(3, 3),
    "cat": lambda a, b: torch.cat([a, b])[1:4],
    "sum": lambda a, b: a.sum(0, keepdim=True).tanh() + b,
    "index": lambda a, b: a[torch.tensor([2, 0, 0])],
    "where": lambda a, b: torch.where(a > 0, a, b),
    "detach": lambda a, b: a.detach() * b,
    "dropout": lambda a, b: torch.dropout(a, 0.3, True),
    "noise": lambda a, b: a * torch.rand_like(b),
    "scaled": scaled,
    "written over": written_over,
    "viewed": viewed,
    "read twice": lambda a, b: ReadTwice.apply(a.tanh()),
}
N_TARGETS = 5


@dataclass(frozen=True)
class Pass:
    """One call of autograd.grad."""

    targets: tuple[int, ...]
    retain: bool


class Frame:
    """One checkpointed function: a list of operators over its two inputs, three parameters, and its own results."""

    def __init__(self, nodes, parameters):
        self.nodes = nodes
        self.parameters = parameters
        self.runs = 0

    def __call__(self, left, right):
        self.runs += 1
        values = [left, right, *self.parameters]
        for name, first, second in self.nodes:
            values.append(OPERATORS[name](values[first % len(values)], values[second % len(values)]))
        return values[-1].sin(), values[-2].cos()


node = st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(0, 30), st.integers(0, 30))
frames = st.lists(st.lists(node, min_size=2, max_size=7), min_size=1, max_size=3)


@st.composite
def passes(draw):
    """All targets, each once, in a random order, in one pass or several."""
    order = draw(st.permutations(range(N_TARGETS)))
    cuts = sorted(draw(st.sets(st.integers(1, N_TARGETS - 1))))
    bounds = [0, *cuts, N_TARGETS]
    return [Pass(tuple(order[a:b]), draw(st.booleans())) for a, b in pairwise(bounds)]


def leaves():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(N_TARGETS)]


def chain(functions, targets, call):
    """Outputs of every frame, so that all graphs live as long as the result."""
    torch.manual_seed(1)
    outputs = [tuple(targets[:2])]
    for function in functions:
        outputs.append(call(function, *outputs[-1]))
    return outputs


def loss_of(outputs):
    left, right = outputs[-1]
    return (left * torch.linspace(0.5, 1.5, 9, dtype=left.dtype).view(3, 3)).sum() + right.square().sum()


def pass_grads(loss, targets, plan, index):
    last = index == len(plan) - 1
    wanted = [targets[target] for target in plan[index].targets]
    return torch.autograd.grad(loss, wanted, retain_graph=not last, allow_unused=True)


def plain_grads(graph, plan):
    """The oracle: the same passes over plain autograd; None if nothing needs a gradient."""
    targets = leaves()
    loss = loss_of(chain([Frame(nodes, targets[2:]) for nodes in graph], targets, lambda f, *args: f(*args)))
    if not loss.requires_grad:
        return None
    return [grad for index in range(len(plan)) for grad in pass_grads(loss, targets, plan, index)]


def equal(ours, theirs):
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@QUICK
@given(graph=frames, plan=passes(), early_stop=st.booleans())
def test_any_split_outside_sessions_gives_plain_gradients(graph, plan, early_stop):
    """Rule 1, rule 6: each pass replays a frame once, once more at most if it reads a value twice."""
    expected = plain_grads(graph, plan)
    targets = leaves()
    functions = [Frame(nodes, targets[2:]) for nodes in graph]
    loss = loss_of(chain(functions, targets, lambda f, *args: regrow.checkpoint(f, *args, early_stop=early_stop)))
    if expected is None:
        assert not loss.requires_grad
        return
    grads = [grad for index in range(len(plan)) for grad in pass_grads(loss, targets, plan, index)]
    assert equal(grads, expected)
    assert all(function.runs - 1 <= 2 * len(plan) for function in functions)


@QUICK
@given(graph=frames, plan=passes(), early_stop=st.booleans(), made_inside=st.booleans(), prefired=st.booleans())
def test_any_split_in_a_session_gives_plain_gradients(graph, plan, early_stop, made_inside, prefired):
    """Rule 9: in a session, whatever is retained or let go; one replay in all if every pass retains."""
    expected = plain_grads(graph, plan)
    targets = leaves()
    functions = [Frame(nodes, targets[2:]) for nodes in graph]
    handles = []

    def call(function, *args):
        with regrow.recompute_handle_collector_ctx() as collected:
            outputs = regrow.checkpoint(function, *args, early_stop=early_stop)
        if any(output.requires_grad for output in outputs):
            handles.extend(collected)
        return outputs

    with ExitStack() as stack:
        if made_inside:
            stack.enter_context(regrow.recompute_session_ctx("s", retain_on_unpack=True))
        outputs = chain(functions, targets, call)
    if prefired:
        for handle in handles:
            regrow.recompute_handle(handle, "s")
    loss = loss_of(outputs)
    if expected is None:
        assert not loss.requires_grad
        return
    grads = []
    for index, each in enumerate(plan):
        with regrow.recompute_session_ctx("s", retain_on_unpack=each.retain):
            grads += pass_grads(loss, targets, plan, index)
    regrow.clear_recompute_session("s")
    assert equal(grads, expected)
    if made_inside or prefired:
        letting_go = sum(not each.retain for each in plan)
        assert all(function.runs - 1 <= 1 + 2 * letting_go for function in functions)
        assert not prefired or sum(function.runs > 1 for function in functions) == len(handles)
