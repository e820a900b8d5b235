"""What stages are made of: policies, precision, frozen and tied weights, nests, hooks, losses, builders."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import regrow
from tests.pipelining.conftest import (
    MICROBATCHES,
    SCHEDULES,
    SPLIT,
    WIDTH,
    Block,
    blocks,
    checkpointed,
    loss_fn,
    make_pipeline,
    plain,
)

pytestmark = pytest.mark.usefixtures("on_each_engine")


def keep_products(ctx, op, *args, **kwargs):
    kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.native_dropout.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def with_policy(module):
    regrow.apply_checkpointing(module, Block, policy_fn=keep_products)
    return module


class Once(nn.Module):
    """A layer that counts its runs, with dropout inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return nn.functional.dropout(self.inner(x), 0.1)


def counting():
    module = blocks(dropout=0.1)
    for block in module:
        block.up = Once(block.up)
    return module


def with_regions(module):
    for block in module:
        regrow.checkpoint_exclude_wrapper(block.up)
    return checkpointed(module)


class Autocast(nn.Module):
    """A stage that computes in bfloat16."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


class Tied(nn.Module):
    """Two blocks that share a matrix, and one scale between them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Block(), Block()
        self.two.up.weight = self.one.up.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.two(self.one(x * self.scale) * self.scale) * self.scale


class Nested(nn.Module):
    """An outer checkpoint around two inner ones."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Block(), Block())
        self.runs = 0

    def forward(self, x):
        return regrow.checkpoint(self.outer, x)

    def outer(self, x):
        self.runs += 1
        return regrow.checkpoint(self.inner[1], regrow.checkpoint(self.inner[0], x))


class PlainNested(Nested):
    def forward(self, x):
        return self.inner(x)


def frozen():
    module = blocks(3)
    module[1].requires_grad_(False)
    return module


VARIANTS = {
    "selective": (lambda: blocks(dropout=0.1), with_policy),
    "regions": (counting, with_regions),
    "bfloat16": (lambda: Autocast(blocks()), checkpointed),
    "frozen": (frozen, checkpointed),
    "tied": (Tied, checkpointed),
    "one layer": (lambda: blocks(1), checkpointed),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("options", [{"keep": "never"}, {"prefire": "on_any_wait", "retention": "none"}], ids=str)
def test_gradients_are_those_without_checkpoints(same, engine, name, variant, options):
    """Rule 26: bit for bit; where torch's split refuses, a parameter at two places, the oracle is regrow's stage.

    Rule 35: reentrant calls that share a parameter add up its gradient in another order.
    """
    if variant == "tied" and engine.use_reentrant:
        same = torch.testing.assert_close
    make, wrap = VARIANTS[variant]
    pipeline = make_pipeline(name, make, wrap=wrap, **options)
    oracle = make_pipeline(name, make) if variant == "tied" else plain(name, make)
    for step in range(2):
        same(pipeline.step(step), oracle.step(step))


@pytest.mark.parametrize("name", [*SPLIT, "DualPipeV", "1F1B"])
@pytest.mark.parametrize("prefire", ["off", "on_any_wait"])
def test_a_region_runs_once_per_micro_batch(name, prefire):
    """Rules 26 and 28: the body once, the rest twice, on every schedule."""
    pipeline = make_pipeline(name, counting, wrap=with_regions, prefire=prefire, keep="never")
    pipeline.step()
    for block in pipeline.blocks:
        block.runs = block.up.runs = 0
    pipeline.step(1)
    assert all((block.runs, block.up.runs) == (2 * MICROBATCHES, MICROBATCHES) for block in pipeline.blocks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_parameter_at_several_places_gets_the_gradient_of_one_process(name):
    """Rule 25: the model run in one piece says so."""
    pipeline = make_pipeline(name, Tied, wrap=checkpointed, prefire="on_wait")
    got = pipeline.step()
    model = nn.Sequential(*make_pipeline(name, Tied).modules)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    loss_fn(model(x), y).backward()
    torch.testing.assert_close(got, [p.grad for module in model for p in module.parameters()])


@pytest.mark.parametrize("name", [*SPLIT, "DualPipeV", "1F1B"])
@pytest.mark.parametrize("prefire", ["off", "on_any_wait"])
def test_nested_checkpoints(same, name, prefire):
    """Rule 15: outer 2, inner 3 and 2, as in one full backward."""
    pipeline, oracle = make_pipeline(name, Nested, prefire=prefire, keep="never"), plain(name, PlainNested)
    pipeline.step()
    for module in pipeline.modules:
        module.runs = module.inner[0].runs = module.inner[1].runs = 0
    same(pipeline.step(1), oracle.step(1))
    for module in pipeline.modules:
        runs = module.runs, module.inner[0].runs, module.inner[1].runs
        assert runs == (2 * MICROBATCHES, 3 * MICROBATCHES, 2 * MICROBATCHES)


@pytest.mark.parametrize("name", [*SPLIT, "DualPipeV", "Interleaved1F1B"])
def test_sharded_stages(same, one_rank, name):
    """Rule 26: under FSDP2 replays come when backward asks for them, one per block and micro-batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))

    def wrap(module):
        return fully_shard(checkpointed(module), mesh=mesh)

    def local(grads):
        return [grad.to_local() for grad in grads]

    pipeline, oracle = make_pipeline(name, wrap=wrap, prefire="on_any_wait", keep="never"), plain(name)
    for step in range(2):
        before = [block.runs for block in pipeline.blocks]
        torch.testing.assert_close(local(pipeline.step(step)), oracle.step(step))
    ran = [block.runs - was for block, was in zip(pipeline.blocks, before, strict=True)]
    assert ran == [2 * MICROBATCHES] * len(ran)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_loss_that_is_checkpointed(same, name):
    """Rule 26: it runs outside the stage; its backward is part of the last stage's."""

    def loss(output, target):
        return regrow.checkpoint(lambda o, t: (o - t).square().exp().mean(), output, target)

    def plain_loss(output, target):
        return (output - target).square().exp().mean()

    pipeline = make_pipeline(name, wrap=checkpointed, loss=loss, prefire="on_wait")
    oracle = plain(name, loss=plain_loss)
    for step in range(2):
        same(pipeline.step(step), oracle.step(step))


@pytest.mark.parametrize("name", SCHEDULES)
def test_hooks_after_accumulation_run_once_per_micro_batch(name):
    """Rule 25: as in a full backward; torch's own split does not run them."""

    def count(pipeline):
        seen = [0] * len(list(pipeline.grads()))
        parameters = [p for module in pipeline.modules for p in module.parameters()]
        for index, parameter in enumerate(parameters):

            def note(_, index=index):
                seen[index] += 1

            parameter.register_post_accumulate_grad_hook(note)
        pipeline.step()
        return seen

    assert set(count(make_pipeline(name, wrap=checkpointed, prefire="on_wait"))) == {MICROBATCHES}


def test_a_builder_of_weight_gradients(same):
    """Rule 26: the user's own second half runs where torch runs it, and can read what was retained."""
    ran = []

    def builder():
        return lambda: ran.append("dw")

    options = {"stage_options": {"dw_builder": builder}}
    pipeline = make_pipeline("InterleavedZeroBubble", wrap=checkpointed, keep="never", **options)
    oracle = plain("InterleavedZeroBubble", **options)
    same(pipeline.step(), oracle.step())
    assert len(ran) == 2 * 2 * MICROBATCHES
    assert all(block.runs == 1 + 2 * MICROBATCHES for block in pipeline.blocks)


def test_retention_may_differ_by_micro_batch(same):
    """Rule 26: a function of stage and micro-batch; the first stage has no dx."""
    asked = []

    def retention(stage, microbatch):
        asked.append((stage, microbatch))
        return "none" if microbatch % 2 else "all"

    pipeline, oracle = make_pipeline("ZBV", wrap=checkpointed, retention=retention, keep="never"), plain("ZBV")
    same(pipeline.step(), oracle.step())
    assert sorted(asked) == [(1, index) for index in range(MICROBATCHES)]
    replays = [block.runs - 1 - MICROBATCHES for block in pipeline.blocks]
    assert replays == [MICROBATCHES] * 2 + [MICROBATCHES * 3 // 2] * 2


class Moody(nn.Module):
    """Saves other tensors from the third micro-batch on: what was learned of the first two is wrong."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return regrow.checkpoint(self.inner, x, self.calls > 2)

    def inner(self, x, late):
        h = self.linear(x).sin() if late else self.linear(x.sin())
        return h.exp() if late else h.sin().sin()


def test_a_wrong_guess_costs_a_replay_and_no_gradient(same):
    """Rule 26: counted, and learned anew."""

    class Plain(Moody):
        def forward(self, x):
            self.calls += 1
            return self.inner(x, self.calls > 2)

    pipeline, oracle = make_pipeline("ZBV", Moody, keep="never"), plain("ZBV", Plain)
    for step in range(3):
        same(pipeline.step(step), oracle.step(step))
    assert pipeline.stages[1].retention_misses >= 1
    assert pipeline.stages[0].retention_misses == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_dies_with_its_last_reference(name):
    """Rule 12: attach makes no cycle."""
    alive = []

    class Marker:
        pass

    def run():
        pipeline = make_pipeline(name, wrap=checkpointed, prefire="on_any_wait")
        pipeline.step()
        marker = Marker()
        pipeline.schedule.marker = marker
        import weakref

        alive.append(weakref.ref(marker))

    gc.collect()
    gc.disable()
    try:
        run()
        leaked = alive[0]() is not None
    finally:
        gc.enable()
    if leaked:  # torch's own schedules may hold themselves; then ours must not be the reason
        alive.clear()
        gc.collect()
        gc.disable()
        try:

            def torchs():
                pipeline = plain(name)
                pipeline.step()
                marker = Marker()
                pipeline.schedule.marker = marker
                import weakref

                alive.append(weakref.ref(marker))

            torchs()
            assert alive[0]() is not None
        finally:
            gc.enable()
