"""Reported situations: backward in two parts, pipeline schedules, and functions that ask whether they are replayed."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from regrow import clear_recompute_session, is_recomputing, recompute_session_ctx, save_region


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.down(torch.tanh(self.up(x))) + x


@pytest.mark.only("hooks", because="the other engine refuses a limited backward outside a scope")
@pytest.mark.case("J1")
def test_dx_and_dw_of_a_session_share_one_replay(engine):
    """Rule 9: both parts of backward are served by one replay, and give full gradients."""
    mine = Block()
    plain = copy.deepcopy(mine)
    x = torch.randn(3, 8, requires_grad=True)
    runs = []
    with recompute_session_ctx("split", retain_on_unpack=True):
        loss = engine.checkpoint(mine, x).square().sum()
        runs.append(mine.runs)
        dinputs, groups = stage_backward_input([loss], None, [x], mine.parameters())
        runs.append(mine.runs)
        assert all(p.grad is None for p in mine.parameters())
        stage_backward_weight(mine.parameters(), groups)
        runs.append(mine.runs)
    clear_recompute_session("split")
    assert runs == [1, 2, 2]

    y = x.detach().clone().requires_grad_()
    plain(y).square().sum().backward()
    torch.testing.assert_close(dinputs[0], y.grad)
    torch.testing.assert_close([p.grad for p in mine.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.only("hooks", because="the other engine refuses a limited backward outside a scope")
@pytest.mark.case("J2")
def test_a_split_backward_without_a_session_is_still_right(engine):
    """Rule 1: without a session more replays are allowed, wrong or missing gradients are not."""
    mine = nn.Sequential(Block(), Block())
    plain = copy.deepcopy(mine)
    batches = [torch.randn(3, 8, requires_grad=True) for _ in range(3)]
    losses = [engine.checkpoint(mine[1], engine.checkpoint(mine[0], x)).square().sum() for x in batches]
    pending = [
        stage_backward_input([loss], None, [x], mine.parameters()) for loss, x in zip(losses, batches, strict=True)
    ]
    for _, groups in pending:
        stage_backward_weight(mine.parameters(), groups)

    copies = [x.detach().clone().requires_grad_() for x in batches]
    for y in copies:
        plain(y).square().sum().backward()
    torch.testing.assert_close([dinputs[0] for dinputs, _ in pending], [y.grad for y in copies])
    torch.testing.assert_close([p.grad for p in mine.parameters()], [p.grad for p in plain.parameters()])


class Stage(nn.Module):
    def __init__(self, block, checkpoint):
        super().__init__()
        self.block = block
        self._checkpoint = checkpoint

    def forward(self, x):
        return self._checkpoint(self.block, x)


def objective(out, target):
    return (out - target).square().sum()


@pytest.mark.only("hooks", because="the other engine needs regrow's own stage")
@pytest.mark.case("J3")
@pytest.mark.parametrize(
    "schedule",
    [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble],
    ids=lambda schedule: schedule.__name__,
)
def test_pipeline_schedules_train_checkpointed_stages(engine, one_rank, schedule):
    """Rule 1: torch's own schedules, two stages in one process, give the loss and gradients of one model."""
    blocks = [Block(), Block()]
    plain = copy.deepcopy(blocks)
    stages = [
        PipelineStage(Stage(block, engine.checkpoint), index, 2, torch.device("cpu"))
        for index, block in enumerate(blocks)
    ]
    run = schedule(stages, 4, loss_fn=objective, scale_grads=False)
    x, target, losses = torch.randn(8, 8), torch.randn(8, 8), []
    run.step(x, target=target, losses=losses)

    want = objective(plain[1](plain[0](x)), target)
    want.backward()
    torch.testing.assert_close(sum(losses).detach(), want.detach())
    torch.testing.assert_close(
        [p.grad for block in blocks for p in block.parameters()],
        [p.grad for block in plain for p in block.parameters()],
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.case("J4")
def test_a_saved_region_runs_once(engine, same):
    """Rule 28: an excluded part runs once in all, the rest twice; gradients go through both."""
    runs = {"outer": 0, "kept": 0}
    w = torch.randn(4, 4, requires_grad=True)

    def kept(t):
        runs["kept"] += 1
        return (t @ w).tanh()

    def outer(t, around):
        runs["outer"] += 1
        return around(kept, t.sin()).exp() * t

    x = torch.randn(3, 4, requires_grad=True)
    engine.checkpoint(outer, x, save_region).sum().backward()
    assert runs == {"outer": 2, "kept": 1}
    same([x.grad, w.grad], list(torch.autograd.grad(outer(x, lambda f, a: f(a)).sum(), [x, w])))


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
@pytest.mark.case("J5")
def test_a_function_can_tell_that_it_is_run_again(engine):
    """Rule 18: metrics are logged in forward only; nested calls answer right as well."""
    log = []

    def inner(t):
        log.append(("inner", is_recomputing()))
        return t.exp()

    def outer(t):
        log.append(("outer", is_recomputing()))
        return engine.checkpoint(inner, t.sin()).cos()

    x = torch.randn(4, requires_grad=True)
    assert not is_recomputing()
    out = engine.checkpoint(outer, x)
    assert log == [("outer", False), ("inner", False)]
    assert not is_recomputing()
    log.clear()
    out.sum().backward()
    assert {again for _, again in log} == {True}
    assert not is_recomputing()
    y = x.detach()
    torch.testing.assert_close(x.grad, -y.sin().exp().sin() * y.sin().exp() * y.cos())
