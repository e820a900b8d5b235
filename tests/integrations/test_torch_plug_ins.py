"""Torch's own plug-in points take regrow: its checkpoint wrapper, its state of models, its distributed checkpoints."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import regrow
from tests.conftest import SEED

ours = partial(checkpoint_wrapper, checkpoint_fn=regrow.checkpoint)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.runs = nn.Linear(8, 16), nn.Linear(16, 8), 0

    def forward(self, x, *, scale=1.0):
        self.runs += 1
        return x + self.down(torch.nn.functional.dropout(self.up(x).tanh(), 0.2)) * scale


def make():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 2))


def by_torch(model):
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=ours, check_fn=lambda part: isinstance(part, Block))
    return model


def by_regrow(model):
    regrow.apply_checkpointing(model, Block)
    return model


WAYS = {"torch's wrapper": by_torch, "regrow's": by_regrow}


def blocks(model):
    return [part for part in model.modules() if isinstance(part, Block)]


def train(model, optimizer, steps=2):
    torch.manual_seed(SEED)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def fit(model):
    return train(model, torch.optim.Adam(model.parameters()))


@pytest.mark.parametrize("way", WAYS)
def test_wrapped_blocks_train_as_plain_ones_at_one_replay(same, way):
    """Rule 40: the function that torch's wrapper is given is all that changes."""
    model = WAYS[way](make())
    same(fit(model), fit(make()))
    assert [block.runs for block in blocks(model)] == [4, 4]


def test_the_wrapper_passes_options_and_keywords_on(same):
    """Rule 40: options at the wrapper, keywords at the call, and tensors among them."""
    kept = []

    def keep(ctx, op, *args, **kwargs):
        kept.append(op)
        return False

    wrapped = ours(Block(), policy_fn=keep, early_stop=False, preserve_rng_state=True)
    x, scale = torch.randn(3, 8, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    plain = wrapped._checkpoint_wrapped_module

    def grads(block):
        torch.manual_seed(1)
        return torch.autograd.grad(block(x, scale=scale).sum(), [x, scale, *plain.parameters()])

    same(grads(wrapped), grads(plain))
    assert kept


def test_a_wrapped_block_leaves_a_handle(same):
    """Rules 9 and 40: a scheduler sees what torch's wrapper checkpoints."""
    model = by_torch(make())
    x = torch.randn(3, 4, requires_grad=True)
    with regrow.recompute_handle_collector_ctx() as handles:
        loss = model(x).sum()
    for handle in handles:
        regrow.recompute_handle(handle, "step")
    with regrow.recompute_session_ctx("step", retain_on_unpack=True):
        torch.autograd.grad(loss, x, retain_graph=True)
    with regrow.recompute_session_ctx("step"):
        torch.autograd.grad(loss, list(model.parameters()))
    regrow.clear_recompute_session("step")
    assert len(handles) == 2
    assert [block.runs for block in blocks(model)] == [2, 2]


@pytest.mark.parametrize("way", WAYS)
def test_states_and_checkpoints_go_to_a_plain_model_and_back(same, one_rank, tmp_path, way):
    """Rules 17 and 40: names of weights and of the optimiser's state are the plain model's."""
    model, plain = WAYS[way](make()), make()
    optimizer, plain_optimizer = (torch.optim.Adam(one.parameters()) for one in (model, plain))
    train(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    assert list(weights) == list(plain.state_dict())
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path)

    loaded = dict(zip(("model", "optimizer"), get_state_dict(plain, plain_optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(plain, plain_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    same(train(plain, plain_optimizer), train(model, optimizer))

    weights, moments = copy.deepcopy(get_state_dict(plain, plain_optimizer))  # else the two share their tensors
    other = WAYS[way](make())
    other_optimizer = torch.optim.Adam(other.parameters())
    get_state_dict(other, other_optimizer)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    same(train(other, other_optimizer), train(plain, plain_optimizer))


@pytest.mark.parametrize("way", WAYS)
def test_sharded_wrapped_blocks_train_as_plain_ones(one_rank, same, way):
    """Rule 40: wrapped first, sharded then, as trainers do."""
    model = WAYS[way](make())
    for part in model:
        fully_shard(part)
    fully_shard(model)
    got = [parameter.full_tensor() for parameter in fit(model)]
    same(got, fit(make()))
    assert [block.runs for block in blocks(model)] == [4, 4]
