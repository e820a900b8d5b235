"""Memory: what a step holds at each point of a split backward, without checkpoints, with torch's and with regrow's.

Prints a table in KiB. Bytes are those of the tensors that operators made and that still live, parameters aside.
"""

from functools import partial

import torch
import torch.utils.checkpoint
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regrow


class Alive(TorchDispatchMode):
    """Notes the memory of every result, weakly."""

    def __init__(self, parameters):
        super().__init__()
        self.storages, self.aside = {}, {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.aside:
                    self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def kib(self):
        return sum(n_bytes for storage, n_bytes in self.storages.values() if not storage.expired()) // 1024


def step(checkpoint):
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])
    table = []
    with Alive(layers.parameters()) as alive:
        x = torch.randn(128, 64, requires_grad=True)
        with regrow.recompute_handle_collector_ctx() as handles:
            h = x
            for layer in layers:
                h = checkpoint(layer, h)
            loss = h.square().mean()
        table.append(alive.kib())
        for handle in handles:
            regrow.recompute_handle(handle, "step")
        table.append(alive.kib())
        with regrow.recompute_session_ctx("step", retain_on_unpack=True):
            dx = torch.autograd.grad(loss, x, retain_graph=True)
        table.append(alive.kib())
        with regrow.recompute_session_ctx("step"):
            dw = torch.autograd.grad(loss, list(layers.parameters()))
        regrow.clear_recompute_session("step")
        del loss, h, handles
        table.append(alive.kib())
    return table, [*dx, *dw]


if __name__ == "__main__":
    ways = {
        "no checkpoint": lambda layer, h: layer(h),
        "torch": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        "regrow": regrow.checkpoint,
    }
    tables = {}
    print(f"{'KiB':15}{'forward':>10}{'prefire':>10}{'dx':>10}{'dw':>10}")
    for name, checkpoint in ways.items():
        tables[name], grads = step(checkpoint)
        print(f"{name:15}" + "".join(f"{kib:10}" for kib in tables[name]))
    kept, held = tables["regrow"][0], tables["no checkpoint"][0]
    print(f"regrow keeps {kept / held:.0%} after forward; after dw only gradients are left")
    assert kept < held / 2 and tables["regrow"][3] == tables["no checkpoint"][3]
