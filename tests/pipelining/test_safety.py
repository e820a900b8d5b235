"""Steps that raise: nothing is left, and the next step of the same schedule is right."""

import random

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import regrow
from tests.pipelining.conftest import SCHEDULES, Block, checkpointed, loss_fn, make_pipeline, plain

pytestmark = pytest.mark.usefixtures("on_each_engine")


class PlannedError(Exception):
    """Raised on purpose."""


class Fuse:
    """Raises when a count is reached, once."""

    def __init__(self):
        self.left = -1

    def burn(self):
        self.left -= 1
        if self.left == 0:
            raise PlannedError


class Fused(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x, fuse):
        ctx.fuse = fuse
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.fuse.burn()
        return grad * 1, None


class Risky(nn.Module):
    """A stage that may raise in forward, in a replay, in dx, in dw."""

    def __init__(self):
        super().__init__()
        self.block, self.weight = Block(), nn.Parameter(torch.ones(8))
        self.fuses = {name: Fuse() for name in ("forward", "replay", "dx", "dw")}
        self.block.before = self.run
        self.weight.register_hook(lambda grad: self.fuses["dw"].burn())

    def run(self):
        self.fuses["replay" if regrow.is_recomputing() else "forward"].burn()

    def forward(self, x):
        return self.block(Fused.apply(x * self.weight, self.fuses["dx"]))


def arm(pipeline, where, count):
    for module in pipeline.modules:
        for name, fuse in module.fuses.items():
            fuse.left = count if name == where else -1


def cause_of(error):
    while error is not None and not isinstance(error, PlannedError):
        error = error.__cause__ or error.__context__
    return error


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("where", ["forward", "replay", "dx", "dw", "loss"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_step_after_one_that_raised(same, name, where, count):
    """Rule 27: right gradients, no replay too many, nothing alive of the aborted step."""
    fuse = Fuse()

    def loss(output, target):
        fuse.burn()
        return loss_fn(output, target)

    pipeline = make_pipeline(name, Risky, wrap=checkpointed, loss=loss, prefire="on_any_wait", keep="never")
    oracle = plain(name, Risky)
    same(pipeline.step(0), oracle.step(0))
    made = []
    for block in pipeline.blocks:
        block.up.register_forward_hook(lambda m, args, out: made.append(StorageWeakRef(out.untyped_storage())))
    arm(pipeline, where, count)
    fuse.left = count if where == "loss" else -1
    with pytest.raises(Exception) as raised:  # noqa: PT011 - torch wraps what stages raise
        pipeline.step(1)
    assert cause_of(raised.value) is not None
    assert not getattr(raised.value, "__notes__", [])
    del raised
    pipeline.losses.clear()
    assert all(storage.expired() for storage in made)
    arm(pipeline, "none", 0)
    same(pipeline.step(2), oracle.step(2))
    same(pipeline.losses, oracle.losses)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBV"])
@pytest.mark.parametrize("where", ["dx", "dw"])
def test_replicas_go_on_after_a_step_that_raised(same, name, where):
    """Rule 27: the reduction that the aborted backward began is forgotten."""
    made = []

    def wrap(module):
        made.append(checkpointed(module))
        return DistributedDataParallel(module)

    pipeline, oracle = make_pipeline(name, Risky, wrap=wrap, prefire="on_wait"), plain(name, Risky)
    same(pipeline.step(0), oracle.step(0))
    for module in made:
        module.fuses[where].left = 4
    with pytest.raises(Exception):  # noqa: B017, PT011 - torch wraps what stages raise
        pipeline.step(1)
    for module in made:
        module.fuses[where].left = -1
    for step in (2, 3):
        same(pipeline.step(step), oracle.step(step))


@pytest.mark.parametrize("name", ["ZBV", "InterleavedZeroBubble"])
def test_torchs_schedule_is_silently_wrong_there(name):
    """The reason for Rule 27: torch's own stage gives wrong gradients in the step after one that raised."""
    pipeline, oracle = plain(name, Risky), plain(name, Risky)
    pipeline.losses = None  # asked for the losses, torch notices that there are too many
    pipeline.step(0)
    arm(pipeline, "dx", 3)
    with pytest.raises(Exception):  # noqa: B017, PT011 - torch wraps what stages raise
        pipeline.step(1)
    arm(pipeline, "none", 0)
    got, want = pipeline.step(2), oracle.step(2)
    assert any(g is None or not torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_two_hundred_steps_with_exceptions_at_random_places():
    """Rule 27: parameters end where a run ends that skips those steps; live bytes after each step stay constant."""
    generator = random.Random(5)
    pipeline, oracle = make_pipeline("ZBV", Risky, wrap=checkpointed, prefire="on_any_wait"), plain("ZBV", Risky)
    optimisers = [
        torch.optim.SGD([p for module in each.modules for p in module.parameters()], lr=0.01)
        for each in (pipeline, oracle)
    ]
    held = []
    for step in range(200):
        fails = step % 10 == 9
        if fails:
            arm(pipeline, generator.choice(["forward", "replay", "dx", "dw"]), generator.randint(1, 4))
            with pytest.raises(Exception):  # noqa: B017, PT011 - torch wraps what stages raise
                pipeline.step(step)
            arm(pipeline, "none", 0)
            continue
        pipeline.step(step)
        oracle.step(step)
        for optimiser in optimisers:
            optimiser.step()
        held.append(live_bytes(pipeline))
    for mine, yours in zip(pipeline.modules, oracle.modules, strict=True):
        for p, q in zip(mine.parameters(), yours.parameters(), strict=True):
            assert torch.equal(p, q)
    assert len(set(held[1:])) == 1


def live_bytes(pipeline):
    """Bytes of everything that a schedule and its stages hold."""
    seen, waiting, found = set(), [pipeline.schedule, *pipeline.stages], {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
            waiting += [value.grad] if value.is_leaf and value.grad is not None else []
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value
        elif type(value).__module__.startswith(("torch.distributed.pipelining", "regrow")):
            waiting += vars(value).values() if hasattr(value, "__dict__") else []
    return sum(found.values())
