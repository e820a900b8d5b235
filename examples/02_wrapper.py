"""Wrapper: the blocks of a model that knows nothing of checkpoints, chosen by class, with no name changed.

Prints what stays the same, and how much less forward keeps for backward.
"""

import torch
from torch import nn

import regrow


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.tokens_seen = 0

    def forward(self, x):
        if not regrow.is_recomputing():  # side effects that must not happen again in a replay
            self.tokens_seen += len(x)
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), *[Block(64) for _ in range(4)], nn.Linear(64, 8))


def step(model):
    """Gradients of one step, and the bytes that autograd holds when forward has ended."""
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # These hooks see what is saved outside of checkpoints, and the inputs of the checkpointed calls.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], sum(kept.values())


if __name__ == "__main__":
    plain, model = make(), make()
    names = list(model.state_dict())
    wrapped = regrow.apply_checkpointing(model, Block)

    (want, before), (got, after) = step(plain), step(model)
    same = all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    print(f"wrapped {len(wrapped)} blocks; names of the state unchanged: {list(model.state_dict()) == names}")
    print(f"gradients equal those of the plain model, bit for bit: {same}")
    print(f"kept for backward: {before // 1024} KiB plain, {after // 1024} KiB checkpointed")
    print(f"tokens counted once, not again in the replay: {[block.tokens_seen for block in wrapped]}")
    assert same and list(model.state_dict()) == names and after < before / 4
