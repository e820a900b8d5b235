"""Every schedule of torch: one replay per block and micro-batch, gradients of the same schedule without checkpoints."""

import collections

import pytest
import torch
from torch import nn

import regrow
from regrow.pipelining import attach, detach
from tests.pipelining.conftest import (
    MICROBATCHES,
    SCHEDULES,
    Block,
    blocks,
    checkpointed,
    loss_fn,
    make_pipeline,
    plain,
)
from tests.support.page import works
from tests.support.rows import on_a_schedule

pytestmark = pytest.mark.usefixtures("on_each_engine")

OPTIONS = {
    "not attached": {},
    "off": {"prefire": "off", "keep": "never"},
    "on wait": {"prefire": "on_wait", "keep": "never"},
    "on any wait": {"prefire": "on_any_wait", "keep": "never", "prefire_bytes": float("inf")},
    "all": {"retention": "all", "keep": "never"},
    "keep": {"keep": "auto"},
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("option", OPTIONS)
def test_one_replay_and_the_same_gradients(same, support, engine, name, option):
    """Rule 26: however backward is cut; the first step, which also infers shapes, and the next ones."""
    pipeline = make_pipeline(name, wrap=checkpointed, **OPTIONS[option])
    oracle = plain(name)
    for step in range(3):
        before = [block.runs for block in pipeline.blocks], [block.runs for block in oracle.blocks]
        same(pipeline.step(step), oracle.step(step))
        same(pipeline.losses, oracle.losses)
        ran = [block.runs - was for block, was in zip(pipeline.blocks, before[0], strict=True)]
        plainly = [block.runs - was for block, was in zip(oracle.blocks, before[1], strict=True)]
        replays = [more - less for more, less in zip(ran, plainly, strict=True)]
        if option == "keep":
            assert all(count <= MICROBATCHES for count in replays)
        else:
            assert replays == [MICROBATCHES] * len(replays)
    if option == "on any wait":
        support(on_a_schedule(name), engine.name, works(replays[0] // MICROBATCHES))


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_replays_where_nothing_is_retained(same, name):
    """Rule 26: dw replays again; a full backward once, and the first stage computes all in W."""
    pipeline = make_pipeline(name, wrap=checkpointed, retention="none", keep="never")
    oracle = plain(name)
    for step in range(2):
        same(pipeline.step(step), oracle.step(step))
    runs = [sum(block.runs for block in module.modules() if isinstance(block, Block)) for module in pipeline.modules]
    once = 2 * (1 + 2 * 2 * MICROBATCHES)  # two blocks; shapes, then forward and a replay in two steps
    split = 2 * 2 * MICROBATCHES if name in ("InterleavedZeroBubble", "ZBV") else 0
    assert runs[0] == once
    if name != "DualPipeV":
        assert runs[1:] == [once + split] * len(runs[1:])


@pytest.mark.parametrize("name", SCHEDULES)
def test_evaluation_runs_forward_only(same, name):
    """Rule 26: eval() collects nothing and leaves nothing, before a step and after one."""
    pipeline, oracle = make_pipeline(name, wrap=checkpointed, prefire="on_wait"), plain(name)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for step in range(2):
        with torch.no_grad():
            got = pipeline.schedule.eval(x, target=y)
            want = nn.Sequential(*oracle.modules)(x)
        torch.testing.assert_close(got, want)
        same(pipeline.step(step), oracle.step(step))


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBV", "DualPipeV", "1F1B"])
def test_stages_without_checkpoints_and_with_some(same, name):
    """Rule 26: regrow's stage is torch's where nothing is checkpointed."""

    def some(module):
        regrow.apply_checkpointing(module, lambda path, child: path == "0")
        return module

    for wrap in (None, some):
        pipeline, oracle = make_pipeline(name, wrap=wrap, prefire="on_wait"), plain(name)
        same(pipeline.step(), oracle.step())


@pytest.mark.parametrize("name", SCHEDULES)
def test_dropout(same, name):
    """Rule 3: random numbers are forward's, wherever the replay is placed."""

    def make():
        return blocks(dropout=0.2)

    pipeline, oracle = make_pipeline(name, make, wrap=checkpointed, prefire="on_any_wait"), plain(name, make)
    for step in range(2):
        same(pipeline.step(step), oracle.step(step))


def test_detach_gives_everything_back():
    """Rule 26: attributes of the one object, as they were."""
    pipeline = make_pipeline("ZBV", wrap=checkpointed)
    before = dict(vars(pipeline.schedule)), [stage.plan for stage in pipeline.stages]
    assert detach(attach(pipeline.schedule, prefire="on_any_wait", retention="none")) is pipeline.schedule
    assert (dict(vars(pipeline.schedule)), [stage.plan for stage in pipeline.stages]) == before
    assert type(pipeline.schedule.bwd_recv_ops) is dict
    detach(pipeline.schedule)
    attach(pipeline.schedule)
    pipeline.step()


def test_no_class_of_torch_is_changed():
    """Rule 23: attach sets attributes on one schedule; another of its class knows nothing of it."""
    one, other = make_pipeline("ZBV", prefire="on_wait"), make_pipeline("ZBV")
    assert "step" in vars(one.schedule)
    assert "step" not in vars(other.schedule)
    assert isinstance(one.modules[0], nn.Module)


def test_a_plan_holds_for_the_steps_of_its_schedule(same):
    """Rule 26: two schedules over the same stages, attached differently, one of which dies."""
    pipeline, oracle = make_pipeline("ZBV", wrap=checkpointed), plain("ZBV")
    other = SCHEDULES["Interleaved1F1B"][0](pipeline.stages, MICROBATCHES, loss_fn=loss_fn)
    attach(pipeline.schedule, keep="never")
    attach(other, keep=lambda stage, microbatch: True)
    first, pipeline.schedule = pipeline.schedule, other
    want = oracle.step()
    same(pipeline.step(), want)
    before = [block.runs for block in pipeline.blocks]
    pipeline.schedule = first
    same(pipeline.step(), want)
    assert [block.runs - was for block, was in zip(pipeline.blocks, before, strict=True)] == [1 + 2 * MICROBATCHES] * 4
    detach(other)
    before = [block.runs for block in pipeline.blocks]
    same(pipeline.step(), want)
    assert [block.runs - was for block, was in zip(pipeline.blocks, before, strict=True)] == [2 * MICROBATCHES] * 4
    del first
    pipeline.schedule = make_pipeline("ZBV").schedule  # both are gone
    pipeline.schedule = SCHEDULES["ZBV"][0](pipeline.stages, MICROBATCHES, loss_fn=loss_fn)
    same(pipeline.step(), want)


def test_detach_leaves_a_step_that_other_code_wrapped(same):
    """Rule 26: the wrapper stays, and what it calls is torch's own step from then on."""
    pipeline, oracle = make_pipeline("ZBV", wrap=checkpointed, keep="never"), plain("ZBV")
    inner, calls = pipeline.schedule.step, []

    def step(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    pipeline.schedule.step = step
    detach(pipeline.schedule)
    assert pipeline.schedule.step is step
    same(pipeline.step(), oracle.step())
    assert calls == [1]
    attach(pipeline.schedule)
    same(pipeline.step(1), oracle.step(1))


def test_an_attach_that_is_refused_changes_nothing():
    """Rule 19: neither the schedule nor its stages."""
    pipeline = make_pipeline("ZBV", wrap=checkpointed)
    pipeline.schedule.fwd_recv_ops = collections.OrderedDict()
    before = dict(vars(pipeline.schedule))
    with pytest.raises(ValueError, match="cannot see its waits"):
        attach(pipeline.schedule)
    assert vars(pipeline.schedule) == before


class PassesItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.weight = Block(), nn.Parameter(torch.ones(8, 8))

    def forward(self, x, *_):
        return self.block(x @ self.weight), self.weight


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBV"])
def test_a_parameter_among_the_outputs_stays_a_parameter(name):
    """Rule 25: and gets the gradient of one full backward."""

    def loss(output, target):
        return (output[0] - target).square().mean() + output[1].square().sum()

    def grads(schedule, attached):
        options = {"prefire": "on_wait"} if attached else {}
        pipeline = make_pipeline(
            schedule, PassesItsWeight, wrap=checkpointed if attached else None, loss=loss, **options
        )
        pipeline.step()
        return pipeline.step(1)

    got, want = grads(name, True), grads("Interleaved1F1B", False)
    torch.testing.assert_close(got, want)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, scale):
        return self.block(x * scale)


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBV", "DualPipeV"])
def test_a_keyword_argument_gets_the_gradient_of_a_full_backward(name):
    """Rule 25: what it is cut from is the user's, on every stage."""

    def grad(schedule, **options):
        pipeline = make_pipeline(schedule, Masked, wrap=checkpointed, **options)
        x, y = (torch.linspace(-1, 1, 64).view(8, 8) for _ in range(2))
        scale = torch.full((8, 8), 0.5, requires_grad=True)
        for _ in range(2):
            scale.grad = None
            pipeline.schedule.step(x, target=y, scale=scale)
        return scale.grad

    torch.testing.assert_close(grad(name, prefire="on_wait"), grad("Interleaved1F1B"))
