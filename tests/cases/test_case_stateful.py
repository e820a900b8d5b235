"""Reported situations: functions that change what they were given. The replay must not show."""

import pytest
import torch
from torch import nn


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
