"""Reported situations: functions that change what they were given. The replay must not show."""

import pytest
import torch
from torch import nn


@pytest.mark.case("C1")
def test_statistics_of_a_normalisation_move_once_per_step(same_grads):
    """Rule 24: running mean, variance and batch count are those of as many plain steps."""

    def program(call):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        grads = []
        for _ in range(3):
            batch = torch.randn(2, 3, 6, 6, requires_grad=True)
            call(net, batch).square().sum().backward()
            grads.append(batch.grad)
        return grads, dict(net.state_dict())

    assert same_grads(program)[1]["1.num_batches_tracked"] == 3


class Router(nn.Module):
    """Sends each token to one expert, and counts the tokens of each."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("tokens_per_expert", torch.zeros(4))

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        with torch.no_grad():
            self.tokens_per_expert.add_(torch.bincount(chosen, minlength=4))
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


@pytest.mark.case("C2")
def test_a_router_counts_each_token_once(same_grads):
    """Rule 24: the load of the experts is what forward counted."""

    def program(call):
        router = Router()
        for _ in range(2):
            call(router, torch.randn(10, 8)).square().sum().backward()
        return [p.grad for p in router.parameters()], router.tokens_per_expert

    assert same_grads(program)[1].sum() == 20


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left in an argument")
@pytest.mark.case("C3")
def test_a_cache_given_as_an_argument_is_extended_once(same_grads):
    """Rule 3: the replay gets the containers as forward saw them, and the caller's are left alone."""

    def program(call):
        proj = nn.Linear(4, 4)

        def attend(x, cache):
            cache["k"].append(proj(x))
            keys = torch.cat(cache["k"])
            return torch.softmax(x @ keys.t(), -1) @ keys

        cache = {"k": [torch.randn(2, 4)]}
        x = torch.randn(3, 4, requires_grad=True)
        call(attend, x, cache).square().sum().backward()
        return x.grad, proj.weight.grad, [len(keys) for keys in cache["k"]]

    assert same_grads(program)[2] == [2, 3]


@pytest.mark.case("C4")
def test_a_dict_refilled_for_the_next_forward_still_serves_the_first(same_grads):
    """Rule 3: two graphs are alive, one dict served both; each replay gets what its forward saw."""

    def program(call):
        weight = torch.randn(4, requires_grad=True)
        carrier, losses = {}, []
        for scale in (1.0, 3.0):
            carrier["kv"] = torch.arange(4.0) * scale
            x = torch.full((4,), scale)
            losses.append(call(lambda x, shared: (x * weight).sin() * shared["kv"], x, carrier).sum())
        sum(losses).backward()
        return weight.grad

    same_grads(program)
