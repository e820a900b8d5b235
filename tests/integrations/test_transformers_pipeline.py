"""A Transformers model cut into the stages of a pipeline. The oracle is the same schedule on torch's own stages."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import ScheduleZBVZeroBubble

from regrow.integrations.transformers import enable
from regrow.pipelining import PipelineStage, attach
from tests.conftest import SEED
from tests.integrations.transformers_models import VOCABULARY, Runs, layers_of, llama, tokens

MICROBATCHES, STAGES = 4, 2


class Stage(nn.Module):
    """A stretch of a Llama's layers, with the embeddings on the first stage and the head on the last one."""

    def __init__(self, model, index):
        super().__init__()
        per_stage = len(model.model.layers) // STAGES
        self.embed = model.model.embed_tokens if index == 0 else nn.Identity()
        self.layers = model.model.layers[index * per_stage : (index + 1) * per_stage]
        self.rotary = model.model.rotary_emb
        self.head = nn.Sequential(model.model.norm, model.lm_head) if index == STAGES - 1 else nn.Identity()

    def forward(self, x):
        hidden = self.embed(x)
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        rotations = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotations, position_ids=positions)
        return self.head(hidden)


def loss_fn(logits, target):
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), target.reshape(-1))


def pipeline(stage_class):
    torch.manual_seed(SEED)
    model = llama(num_hidden_layers=4, attention_dropout=0.0)
    modules = [Stage(model, index) for index in range(STAGES)]
    stages = [stage_class(module, index, STAGES, torch.device("cpu")) for index, module in enumerate(modules)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=loss_fn)
    return model, modules, schedule


def fit(model, schedule, steps=3):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    batch = tokens().repeat(MICROBATCHES, 1)
    for _ in range(steps):
        optimizer.zero_grad()
        step_losses = []
        schedule.step(batch, target=batch, losses=step_losses)
        losses.append(torch.stack(step_losses).mean().item())
        optimizer.step()
    return losses, [parameter.detach() for parameter in model.parameters()]


def test_a_split_llama_trains_through_zbv(one_rank, same):
    """Rules 26 and 39: losses and weights of the schedule without checkpoints, one replay per layer and micro-batch."""
    plain, _, plain_schedule = pipeline(TorchStage)
    theirs = Runs(layers_of(plain, "Llama"))
    want = fit(plain, plain_schedule)

    model, modules, schedule = pipeline(PipelineStage)
    for module in modules:
        enable(module)
    attach(schedule, keep="never")
    ours = Runs(layers_of(model, "Llama"))
    got = fit(model, schedule)
    same(got, want)
    assert [mine - yours for mine, yours in zip(ours.counts, theirs.counts, strict=True)] == [3 * MICROBATCHES] * 4
    assert got[0][-1] < got[0][0]
