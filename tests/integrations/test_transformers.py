"""Transformers: one call migrates a model. The oracle is the model without checkpoints."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import transformers
from torch import nn

import regrow
from regrow.integrations.transformers import disable, enable
from tests.integrations.transformers_models import KINDS, Runs, layers_of, llama, make, text, tokens, train

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_plain_models_at_one_replay_per_layer(same, kind):
    """Rule 39: dropout, jitter and auxiliary losses included."""
    want = train(make(kind), kind)
    model = enable(make(kind))
    runs = Runs(layers_of(model, kind))
    same(train(model, kind), want)
    assert runs.counts == [2] * len(runs.counts)
    assert len(runs.counts) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_disabled_it_is_what_it_was(kind):
    """Rule 39: every attribute, of every module."""
    model = make(kind)
    before = [dict(module.__dict__) for module in model.modules()]
    disable(enable(model))
    assert [dict(module.__dict__) for module in model.modules()] == before
    runs = Runs(layers_of(model, kind))
    train(model, kind)
    assert runs.counts == [1] * len(runs.counts)


def test_torchs_checkpointing_comes_back(same):
    """Rule 39: what was enabled before is enabled again."""
    model = make("Llama")
    model.activation_checkpointing_enable()
    before = [dict(module.__dict__) for module in model.modules()]
    enable(model)
    with regrow.recompute_handle_collector_ctx() as handles:
        same(train(model, "Llama"), train(make("Llama"), "Llama"))
    assert len(handles) == 2
    disable(disable(model))
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_tensors_by_keyword_get_their_gradients(same):
    """Rule 39: positional or by keyword, in containers too, and checked by name."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def forward(self, x=None, *, pair=None, **kwargs):
            return (x * pair[0]).sin() * pair[1] + kwargs["shift"].exp()

    def leaves():
        torch.manual_seed(1)
        return [torch.randn(3, requires_grad=True) for _ in range(4)]

    def run(layer):
        x, first, second, shift = inputs = leaves()
        return torch.autograd.grad(layer(x=x, pair=(first, second), shift=shift).sum(), inputs)

    same(run(enable(Layer())), run(Layer()))

    x, first, second, shift = leaves()
    out = enable(Layer())(x=x, pair=(first, second), shift=shift).sum()
    with torch.no_grad():
        first.mul_(2)
    with pytest.raises(regrow.InputChangedError, match=r"Layer.forward: .*pair\[0\]"):
        out.backward()


def test_no_cache_while_layers_are_checkpointed_and_one_otherwise():
    """Rule 39: as Transformers does it."""
    model = enable(make("Llama"))
    assert model(**text(), use_cache=True).cache is None
    assert model.eval()(**text(), use_cache=True).cache is not None
    generated = model.generate(tokens(), max_new_tokens=2, do_sample=False, pad_token_id=0)
    want = disable(model).generate(tokens(), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, want)


def test_a_frozen_base_with_a_few_trained_parts(same):
    """Rule 39: nothing has to be done to the embeddings."""

    def adapted(model):
        model.requires_grad_(False)
        torch.manual_seed(1)
        for layer in model.model.layers:
            linear = layer.self_attn.q_proj
            low = nn.Parameter(torch.randn_like(linear.weight) * 0.1)
            linear.low = low
            linear.register_forward_hook(lambda module, args, out: out + args[0] @ module.low.T)
        return model

    want = train(adapted(make("Llama")), "Llama")
    model = enable(adapted(make("Llama")))
    runs = Runs(layers_of(model, "Llama"))
    same(train(model, "Llama"), want)
    assert runs.counts == [2, 2]
    assert [grad is not None for grad in want[1]].count(True) == 2


def test_every_second_layer(same):
    """Rule 39: the first layer, the third, and so on."""
    plain, model = llama(num_hidden_layers=4), llama(num_hidden_layers=4)
    model.load_state_dict(plain.state_dict())
    enable(model, every_n_layers=2)
    runs = Runs(layers_of(model, "Llama"))
    same(train(model, "Llama"), train(plain, "Llama"))
    assert runs.counts == [2, 1, 2, 1]


def test_inputs_in_host_memory(same):
    """Rule 39: hidden states and what else a layer is given."""
    want = train(make("Llama"), "Llama")
    same(train(enable(make("Llama"), offload=True), "Llama"), want)


def test_options_are_those_of_checkpoint(same):
    """Rule 39: a policy keeps what it keeps."""
    kept = []

    def keep_products(ctx, op, *args, **kwargs):
        if op is torch.ops.aten.mm.default:
            kept.append(ctx.is_recompute)
            return True
        return False

    model = enable(make("Llama"), policy_fn=keep_products, early_stop=False)
    same(train(model, "Llama"), train(make("Llama"), "Llama"))
    assert kept
    with pytest.raises(ValueError, match="no option of checkpoint"):
        enable(model, earlystop=True)


def test_a_session_shares_the_replays(same):
    """Rules 9 and 39: dx and dw of a model cost one replay per layer."""
    model = enable(make("Llama"))
    runs = Runs(layers_of(model, "Llama"))
    embedded = model.get_input_embeddings()(tokens()).detach().requires_grad_()
    weights = list(model.parameters())

    def step(loss):
        dx = torch.autograd.grad(loss, embedded, retain_graph=True)
        return dx, torch.autograd.grad(loss, weights, allow_unused=True)

    with regrow.recompute_session_ctx("step", retain_on_unpack=True):
        torch.manual_seed(1)
        got = step(model(inputs_embeds=embedded, labels=tokens()).loss)
    regrow.clear_recompute_session("step")
    assert runs.counts == [2, 2]
    torch.manual_seed(1)
    same(got, step(disable(model)(inputs_embeds=embedded, labels=tokens()).loss))


def test_copies_and_pickles_are_enabled_and_independent(same):
    """Rule 39: a copy is enabled, and enabling it anew reaches the copy."""
    model = enable(make("Llama"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.activation_checkpointing_enable({"early_stop": False})
        runs = Runs(layers_of(other, "Llama"))
        same(train(other, "Llama"), train(make("Llama"), "Llama"))
        assert runs.counts == [2, 2]
        assert other.model.layers[0]._gradient_checkpointing_func.options.early_stop is False
        disable(other)
    assert model.model.layers[0]._gradient_checkpointing_func.options.early_stop is True
    assert model.is_activation_checkpointing


def test_an_enabled_model_dies_with_its_last_reference(gc_off):
    """Rule 12: enabling adds no cycle."""
    model = enable(make("Llama"))
    train(model, "Llama")
    gc.collect()
    alive = weakref.ref(model)
    del model
    assert alive() is None


@pytest.mark.parametrize("name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_whoever_enables_checkpointing_gets_regrow(name):
    """Rule 39: trainers and libraries call the model's own methods, with torch's options."""
    model = enable(make("Llama"), every_n_layers=2)
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing
    getattr(model, name)({"use_reentrant": False, "preserve_rng_state": False})
    with regrow.recompute_handle_collector_ctx() as handles:
        loss = model(**text()).loss
    assert len(handles) == 1
    del loss
    disable(model)
    getattr(model, name)({"use_reentrant": False})
    with regrow.recompute_handle_collector_ctx() as handles:
        model(**text())
    assert handles == []


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_takes_the_same_steps(same, tmp_path):
    """Rule 39: with the Trainer's own switch on, too."""

    def fit(model, **options):
        runs = Runs(layers_of(model, "Llama"))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            **options,
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens().repeat(3, 1)]
        transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
        return [parameter.detach() for parameter in model.parameters()], runs.counts

    want, _ = fit(make("Llama"))
    kept, ours = fit(enable(make("Llama")))
    same(kept, want)
    kwargs = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    model = enable(make("Llama"))
    with regrow.recompute_handle_collector_ctx() as handles:
        switched, theirs = fit(model, **kwargs)
    same(switched, want)
    assert (ours, theirs, len(handles)) == ([6, 6], [6, 6], 6)


def test_compiled_it_is_one_graph(same):
    """Rules 22 and 39: while torch traces, a layer is torch's own checkpoint."""
    torch._dynamo.reset()
    model = enable(llama(attention_dropout=0.0, num_hidden_layers=1))
    batch = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(**batch).loss.backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    disable(model)(**batch).loss.backward()
    for mine, yours in zip(got, (parameter.grad for parameter in model.parameters()), strict=True):
        torch.testing.assert_close(mine, yours)
    torch._dynamo.reset()


def test_the_library_is_imported_when_a_model_is_enabled(fresh_process):
    """Rule 20: a leaf costs nothing before it is used."""
    program = "import sys, regrow.integrations.transformers; print('transformers' in sys.modules)"
    assert fresh_process(program).strip() == "False"
