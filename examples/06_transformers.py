"""Transformers: one call makes the gradient checkpointing of a model regrow's, in a Trainer or in a loop of your own.

Needs the library: pip install transformers. The model is small and random, nothing is downloaded.
Prints that losses and weights are those of the model without checkpoints, and how often a layer ran.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from regrow.integrations.transformers import disable, enable

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}


def make():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).train()


def train(model, steps=3):
    """Losses, and how often the first part of each layer ran."""
    runs = [0] * len(model.model.layers)
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_pre_hook(lambda *_, i=index: runs.__setitem__(i, runs[i] + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, runs


if __name__ == "__main__":
    plain = make()
    want, once = train(plain)

    model = enable(make())
    losses, twice = train(model)
    same = all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    print(f"layers ran {once} times in 3 steps without checkpoints, {twice} with: one replay each")
    print(f"losses equal: {losses == want}; weights equal, bit for bit: {same}")
    print(f"disabled again: {not disable(model).is_activation_checkpointing}")
    assert losses == want and same and twice == [6, 6, 6]
