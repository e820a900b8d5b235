"""Mixtures of experts: a replay that routes otherwise is found, and a saved routing makes it right."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import regrow
from regrow.arguments import DETERMINISM_CHECKS
from regrow.integrations.transformers import enable
from tests.conftest import SEED
from tests.integrations.transformers_models import make, train

WIDTH, EXPERTS, CHOSEN, TOKENS = 8, 4, 2, 16


def noise(scores):
    """From a generator that is not torch's, so no replay can rewind it."""
    return scores + torch.tensor([[random.gauss(0, 1) for _ in range(EXPERTS)] for _ in range(len(scores))])


def ties(scores):
    """Scores that are equal, broken by whatever comes."""
    return (scores * 2).round() + torch.tensor([random.random() / 2 for _ in range(EXPERTS)])


def low_precision(scores):
    """A kernel that rounds otherwise when it runs again."""
    steps = 1 if regrow.is_recomputing() else 2**20
    return (scores * steps).round() / steps


UNSTABLE = {"noise": noise, "ties": ties, "low precision": low_precision}


class Experts(nn.Module):
    """The best ``CHOSEN`` experts of each token; what each expert saves depends on how many tokens it gets."""

    def __init__(self, unstable, *, region=False):
        super().__init__()
        torch.manual_seed(SEED)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.unstable, self.region, self.routed = unstable, region, 0

    def route(self, x):
        self.routed += 1
        scores = self.gate(x)
        chosen = torch.topk(self.unstable(scores.detach()), CHOSEN, dim=-1).indices
        return scores.softmax(-1).gather(1, chosen), chosen

    def forward(self, x):
        weights, chosen = regrow.save_region(self.route, x) if self.region else self.route(x)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            routed = expert(x[token]).tanh() * weights[token, place, None]
            out = out.index_add(0, token, routed.to(out.dtype))
        return out


def grads(experts, call=None):
    """Gradients of one call, whose routing starts from the same place each time."""
    random.seed(SEED)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = (experts(x) if call is None else call(experts, x)).square().sum()
    return torch.autograd.grad(loss, [x, *experts.parameters()])


def keep_choices(ctx, op, *args, **kwargs):
    kept = op is torch.ops.aten.topk.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("unstable", UNSTABLE)
def test_a_replay_that_routes_otherwise_is_found(unstable):
    """Rule 4: experts save other shapes when they get other numbers of tokens."""
    with pytest.raises(regrow.ReplayMismatchError):
        grads(Experts(UNSTABLE[unstable]), regrow.checkpoint)


@pytest.mark.skipif("values" not in DETERMINISM_CHECKS, reason="this version compares no values")
def test_other_tokens_in_the_same_numbers_are_found_by_values():
    """Rule 4: shapes are equal, so the default check cannot see it."""

    def swapped(scores):
        return scores.flip(0) if regrow.is_recomputing() else scores.flip(0).flip(0)

    with pytest.raises(regrow.CheckpointError):
        grads(Experts(swapped), lambda function, x: regrow.checkpoint(function, x, determinism_check="values"))


@pytest.mark.parametrize("unstable", UNSTABLE)
def test_a_policy_that_keeps_the_choice_makes_it_right(same, unstable):
    """Rules 1 and 16: the gate is replayed, what it chose is not."""
    experts = Experts(UNSTABLE[unstable])
    got = grads(experts, lambda function, x: regrow.checkpoint(function, x, policy_fn=keep_choices))
    same(got, grads(Experts(UNSTABLE[unstable])))
    assert experts.routed == 2


@pytest.mark.parametrize("unstable", UNSTABLE)
def test_a_region_around_the_router_makes_it_right(same, unstable):
    """Rules 1 and 28: the router runs once."""
    experts = Experts(UNSTABLE[unstable], region=True)
    same(grads(experts, regrow.checkpoint), grads(Experts(UNSTABLE[unstable])))
    assert experts.routed == 1


def test_noise_from_torchs_generator_needs_nothing(same):
    """Rule 3: it is drawn again as it was."""

    def jitter(scores):
        return scores + torch.randn_like(scores)

    def seeded(call=None):
        torch.manual_seed(SEED + 1)
        return grads(experts, call)

    experts = Experts(jitter)
    same(seeded(regrow.checkpoint), seeded())


def test_scores_in_low_precision_need_nothing(same):
    """Rule 3: a replay casts as forward did, wherever backward is called."""

    def call(function, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return regrow.checkpoint(function, x) if checkpointed else function(x)

    experts = Experts(lambda scores: scores)
    checkpointed = True
    got = grads(experts, call)
    checkpointed = False
    same(got, grads(experts, call))


@pytest.mark.parametrize("way", ["region", "policy"])
def test_a_transformers_mixture_keeps_its_routing(same, way):
    """Rules 28 and 39: its routers are modules, and regions of the layers that are checkpointed."""
    kind = "mixture of experts"
    want = train(make(kind), kind)
    model = make(kind)
    routed = [0]
    routers = [layer.mlp.gate for layer in model.model.layers]
    for router in routers:
        router.register_forward_hook(lambda *_: routed.__setitem__(0, routed[0] + 1))
        if way == "region":
            regrow.checkpoint_exclude_wrapper(router)
    enable(model, **({"policy_fn": keep_choices} if way == "policy" else {}))
    same(train(model, kind), want)
    assert routed == [len(routers) * (1 if way == "region" else 2)]
