"""Small Transformers models, randomly initialised from their configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from tests.conftest import SEED

VOCABULARY, BATCH, LENGTH = 32, 2, 6
WIDTHS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tokens() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def text() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def pictures() -> dict[str, torch.Tensor]:
    pixels = torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


@dataclass(frozen=True)
class Kind:
    """A model to make, what it is given, and the class of its layers."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    layer: str


def llama(**options: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**WIDTHS, "attention_dropout": 0.1, **options}))


KINDS = {
    "Llama": Kind(llama, text, "LlamaDecoderLayer"),
    "Qwen3": Kind(
        lambda: Qwen3ForCausalLM(Qwen3Config(**WIDTHS, head_dim=8, attention_dropout=0.1)), text, "Qwen3DecoderLayer"
    ),
    "GPT-2": Kind(
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0)
        ),
        text,
        "GPT2Block",
    ),
    "T5": Kind(
        lambda: T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
            )
        ),
        text,
        "T5Block",
    ),
    "ViT": Kind(
        lambda: ViTForImageClassification(
            ViTConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
                hidden_dropout_prob=0.1,
            )
        ),
        pictures,
        "ViTLayer",
    ),
    "mixture of experts": Kind(
        lambda: MixtralForCausalLM(
            MixtralConfig(**WIDTHS, num_local_experts=4, output_router_logits=True, router_jitter_noise=0.1)
        ),
        text,
        "MixtralDecoderLayer",
    ),
}


def make(kind: str) -> nn.Module:
    """The same weights each time, in training mode."""
    torch.manual_seed(SEED)
    return KINDS[kind].make().train()


def layers_of(model: nn.Module, kind: str) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == KINDS[kind].layer]


class Runs:
    """How often each layer was begun, told by the first of its modules that runs: hooks of a layer itself run once."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.counts = [0] * len(layers)
        for index, layer in enumerate(layers):
            first = next(
                module for module in layer.modules() if isinstance(module, nn.Linear) or _is_projection(module)
            )
            first.register_forward_pre_hook(lambda module, args, index=index: self._note(index))

    def _note(self, index: int) -> None:
        self.counts[index] += 1


def _is_projection(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"  # of GPT-2


def train(model: nn.Module, kind: str, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Loss and gradients of one step, from the same random numbers each time."""
    torch.manual_seed(SEED)
    loss = model(**KINDS[kind].batch(), **options).loss
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return loss.detach(), grads
