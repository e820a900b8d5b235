"""The same programs without checkpoint, through torch's checkpoint, and through regrow: same values, same gradients."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

import regrow
from tests.parity.parity_programs import PROGRAMS


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


CHECKPOINTS = {
    "torch": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "regrow": regrow.checkpoint,
    "regrow, whole replays": partial(regrow.checkpoint, early_stop=False),
}


def tensors(values):
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def loss_of(outputs):
    """A number that weighs every element differently."""
    total = torch.zeros((), dtype=torch.float64)
    for output in tensors(outputs):
        if output.requires_grad:
            real = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
            weights = torch.linspace(0.5, 1.5, real.numel(), dtype=torch.float64).view(real.shape)
            total = total + (real * weights).sum()
    return total


def forward(case, ckpt):
    torch.manual_seed(1)
    with torch.autocast("cpu", case.autocast) if case.autocast else nullcontext():
        return ckpt(case.function, *case.args, **case.kwargs)


def gradients(case, loss, **options):
    return torch.autograd.grad(loss, case.leaves, allow_unused=True, **options)


def backward(case, outputs):
    if not case.second_order:
        return list(gradients(case, loss_of(outputs)))
    first = gradients(case, loss_of(outputs), create_graph=True)
    return [*first, *gradients(case, loss_of([grad.sin() for grad in first if grad is not None]))]


def built(build, ckpt):
    torch.manual_seed(0)
    return build(ckpt)


def run(build, ckpt):
    """Outputs, gradients and the generator's state after forward, as one list."""
    case = built(build, ckpt)
    outputs = forward(case, ckpt)
    state = torch.get_rng_state()
    return [*tensors(outputs), state, *backward(case, outputs), torch.get_rng_state()]


def equal(ours, theirs):
    if ours is None or theirs is None:
        return ours is theirs
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs) and ours.requires_grad == theirs.requires_grad


def differences(ours, theirs):
    """Places where two lists differ; an empty list is parity."""
    pairs = zip(ours, theirs, strict=True)
    return [index for index, pair in enumerate(pairs) if not equal(*pair)]


# torch stops its replay before the operator has written the noise it saved, and gives another gradient.
TORCH_DIFFERS = {"noise_is_the_last_thing_saved"}

through_each_checkpoint = pytest.mark.parametrize(
    ("build", "through"),
    [
        pytest.param(build, through, id=f"{name}-{through}")
        for name, build in PROGRAMS.items()
        for through in CHECKPOINTS
        if not (through == "torch" and name in TORCH_DIFFERS)
    ],
)


@through_each_checkpoint
def test_a_program_gives_what_it_gives_without_checkpoint(build, through):
    """Rule 1: same outputs, same gradients, same generator afterwards, bit for bit."""
    assert differences(run(build, CHECKPOINTS[through]), run(build, plain)) == []


def outermost(function, *args, **kwargs):
    """Sessions take one level: what nests inside runs plainly."""
    return function(*args, **kwargs)


def in_session(build, *, prefired, retain):
    """Run a program with a pass for each of its leaves, all in one session."""
    case = built(build, outermost)
    with regrow.recompute_session_ctx("s", retain_on_unpack=True), regrow.recompute_handle_collector_ctx() as handles:
        outputs = forward(case, regrow.checkpoint)
    state = torch.get_rng_state()
    if prefired:
        for handle in handles:
            regrow.recompute_handle(handle, "s")
    if case.second_order:
        with regrow.recompute_session_ctx("s", retain_on_unpack=retain):
            grads = backward(case, outputs)
    else:
        loss = loss_of(outputs)
        grads = []
        for leaf in case.leaves:
            with regrow.recompute_session_ctx("s", retain_on_unpack=retain):
                grads += torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
    regrow.clear_recompute_session("s")
    return [*tensors(outputs), state, *grads, torch.get_rng_state()]


@pytest.mark.parametrize("retain", [True, False], ids=["retained", "let go"])
@pytest.mark.parametrize("prefired", [True, False], ids=["prefired", "lazy"])
@pytest.mark.parametrize("build", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_split_into_a_pass_for_each_leaf_gives_the_same(build, prefired, retain):
    """Rule 9: in a session, prefired or not, retained or let go, pass by pass: the gradients of plain autograd."""
    ours = in_session(build, prefired=prefired, retain=retain)
    case = built(build, plain)
    outputs = forward(case, plain)
    state = torch.get_rng_state()
    if case.second_order:
        grads = backward(case, outputs)
    else:
        loss = loss_of(outputs)
        grads = [
            grad
            for leaf in case.leaves
            for grad in torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
        ]
    assert differences(ours, [*tensors(outputs), state, *grads, torch.get_rng_state()]) == []


@through_each_checkpoint
def test_a_program_whose_backward_is_repeated_gives_the_same_twice(build, through):
    """Rule 1: two backwards with retain_graph, each the same as without checkpoint."""
    grads = []
    for ckpt in (CHECKPOINTS[through], plain):
        case = built(build, ckpt)
        loss = loss_of(forward(case, ckpt))
        grads.append([grad for _ in range(2) for grad in gradients(case, loss, retain_graph=True)])
    assert differences(*grads) == []
