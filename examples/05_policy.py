"""Selective checkpointing: a policy keeps the results of matrix products, everything else is replayed.

Prints what backward computes again with a checkpoint, and with a checkpoint and the policy.
"""

from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

import regrow

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class Operators(TorchDispatchMode):
    """Counts the operators that really run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts["product" if func in PRODUCTS else func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def step(block, call):
    """Gradients, and the operators that ran from the end of forward to the end of backward."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = call(block, x).sum()
    with Operators() as operators:
        grads = torch.autograd.grad(loss, [x, *block.parameters()])
    return grads, operators.counts


if __name__ == "__main__":
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
    want, plain = step(block, lambda block, x: block(x))
    everything, replayed = step(block, regrow.checkpoint)
    selected, kept = step(block, lambda block, x: regrow.checkpoint(block, x, policy_fn=keep_products))

    def again(counts, name):
        return counts[name] - plain[name]

    print(f"checkpoint: {again(replayed, 'product')} products and {again(replayed, 'gelu')} GELUs ran again")
    print(f"and policy: {again(kept, 'product')} products and {again(kept, 'gelu')} GELUs ran again")
    same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, everything, selected, strict=True))
    print(f"gradients equal plain autograd's, bit for bit, in both: {same}")
    assert same and (again(replayed, "product"), again(kept, "product"), again(kept, "gelu")) == (3, 0, 2)
