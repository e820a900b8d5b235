"""State that a forward reads and changes: buffers, train and eval mode, parameters, generators. Right, or refused.

    forward    note versions, keep small buffers as they are  ->  function  ->  note what it changed
    replay     begin with forward's values  ->  function  ->  put back what was there

A buffer is put in place of the module's own for the time of a replay, so the module's tensor is never written and its
version never moves. A parameter or a captured tensor that was changed since is refused: its old value is gone.
"""

from __future__ import annotations

from operator import attrgetter
from weakref import WeakKeyDictionary

import torch
from torch import nn

from regrow._core import compat
from regrow._core.copies import copies
from regrow._core.faults import StateChangedError
from regrow._core.reach import Reach

# Up to this size a buffer is copied in every forward and put in place in every replay, changed or not: kernels such as
# batch normalisation write buffers without moving their version. Larger ones are kept only if a forward changes them.
SMALL_BYTES = 64 * 1024

_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

_training = attrgetter("training")

# Large buffers that a forward was seen to leave alone or to change, by module, name and mode.
_changes: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()


class Buffer:
    """One buffer at the beginning of forward.

    Attributes:
        tensor: the module's own tensor, and its version, first before forward, then after it.
        start: a copy from before forward; None if none was taken, or none is needed.
        always: whether a replay begins with the copy without asking.
        changed: whether forward changed it.
    """

    __slots__ = ("always", "changed", "module", "name", "start", "tensor", "version")

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.module = module
        self.name = name
        self.tensor = tensor
        self.version = compat.version_of(tensor)
        self.always = tensor.numel() * tensor.element_size() <= SMALL_BYTES or isinstance(module, _NORMS)
        self.changed = False
        self.start: torch.Tensor | None = None

    def is_kept(self) -> bool:
        """Whether to copy it before forward."""
        return self.always or _changes.get(self.module, {}).get((self.name, self.module.training), True)

    def after_forward(self) -> None:
        """Note whether forward changed it; a large one that it left alone is not kept, now and from now on."""
        now = self.module._buffers.get(self.name)
        self.changed = self.moved()
        if now is not None:
            self.tensor = now
            self.version = compat.version_of(now)
        if not self.always:
            _changes.setdefault(self.module, {})[self.name, self.module.training] = self.changed
            if not self.changed:
                self.start = None

    def needs_start(self) -> bool:
        """Whether a replay must begin with the copy from before forward."""
        return self.always or self.changed or self.moved()

    def moved(self) -> bool:
        """Whether the module has another tensor there, or the tensor another version, than last noted."""
        now = self.module._buffers.get(self.name)
        return now is not self.tensor or compat.version_of(self.tensor) != self.version


class State:
    """What one call reaches, as it was in forward.

    Memory: holds copies of small buffers, and of large ones that forward changes, until the graph of the call dies.
    """

    __slots__ = (
        "_buffers",
        "_fixed",
        "_generators",
        "_modes",
        "_modules",
        "_names",
        "_parameters",
        "_reached",
        "_versions",
    )

    def __init__(self, reached: Reach) -> None:
        # A function may reach a whole model: lists and one pass each, and no names before one is needed.
        self._reached = reached
        self._modules = _modules(reached)
        self._modes = list(map(_training, self._modules))
        # Which buffers there were, a None among them; forward may fill it, add some, or take some away.
        # By identity: a module may define equality by value, or no hash.
        self._names = {id(module): dict(module._buffers) for module in self._modules if module._buffers}
        self._buffers = [
            Buffer(module, name, tensor)
            for module in self._modules
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]
        kept = [buffer for buffer in self._buffers if buffer.is_kept()]
        for buffer, copy in zip(kept, copies([buffer.tensor for buffer in kept]) if kept else (), strict=True):
            buffer.start = copy
        self._parameters = _parameters(self._modules)
        self._fixed = [*(tensor for _, tensor in reached.tensors.values()), *self._parameters]
        self._versions = compat.versions_of(self._fixed)
        self._generators = [(generator, generator.get_state()) for generator in reached.generators.values()]

    def after_forward(self) -> None:
        """Note what forward changed. A captured tensor that forward itself writes is the user's own state."""
        for buffer in self._buffers:
            buffer.after_forward()
        now = compat.versions_of(self._fixed)
        if now != self._versions:
            kept = [index for index in range(len(now)) if now[index] == self._versions[index]]
            self._fixed = [self._fixed[index] for index in kept]
            self._versions = [self._versions[index] for index in kept]

    def begin(self, label: str, *, complete: bool) -> Begun:
        """Make everything as forward found it; StateChangedError, before anything is touched, where that is gone.

        Args:
            label: the call.
            complete: whether forward has returned; in its middle, what was written was written by itself.
        """
        stale = [buffer for buffer in self._buffers if buffer.needs_start()]
        lost = self._lost() if complete else []
        lost += [buffer.tensor for buffer in stale if buffer.start is None]
        rebound = self._reached.rebound() if complete else []
        if lost or rebound:
            raise StateChangedError(label, self._names_of(lost), rebound)
        begun = Begun(self._modules, [(generator, generator.get_state()) for generator, _ in self._generators])
        self._place_buffers(stale, begun)
        if begun.modes != self._modes:
            for module, training in zip(self._modules, self._modes, strict=True):
                module.training = training
        for generator, state in self._generators:
            generator.set_state(state)
        return begun

    def _place_buffers(self, stale: list[Buffer], begun: Begun) -> None:
        starts = [buffer.start for buffer in stale if buffer.start is not None]
        placed = copies(starts) if starts else []
        for module in self._modules:
            if module._buffers or id(module) in self._names:
                begun.buffers.append((module, dict(module._buffers)))
                module._buffers.clear()
                module._buffers.update(self._names.get(id(module), {}))
        for buffer, tensor in zip(stale, placed, strict=True):
            buffer.module._buffers[buffer.name] = tensor

    def _lost(self) -> list[torch.Tensor]:
        now = compat.versions_of(self._fixed)
        moved = []
        if now != self._versions:
            moved = [self._fixed[index] for index in range(len(now)) if now[index] != self._versions[index]]
        here = _parameters(self._modules)
        if list(map(id, here)) != list(map(id, self._parameters)):
            there = set(map(id, here))
            # Sharded parameters are swapped for whole ones and back by whoever shards them.
            moved += [p for p in self._parameters if id(p) not in there and type(p) is nn.Parameter]
        node = compat.current_node() if moved else None
        if node is None:
            return moved
        # A function may reach a whole model and use one block of it; what an optimiser that steps in the middle of
        # backward has changed so far lies above. What the function used lies below the node that asks.
        below = compat.parameters_below(node)
        return [tensor for tensor in moved if not tensor.requires_grad or id(tensor) in below]

    def _names_of(self, tensors: list[torch.Tensor]) -> list[str]:
        known = {id(tensor): name for name, tensor in self._reached.tensors.values()}
        for path, module in self._reached.modules.values():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                known.setdefault(id(tensor), f"{path}.{name}" if path else name)
        return [known.get(id(tensor), "a tensor that was replaced since") for tensor in tensors]


class Begun:
    """What a replay found and has to put back."""

    __slots__ = ("buffers", "generators", "modes", "modules")

    def __init__(self, modules: list[nn.Module], generators: list[tuple[torch.Generator, torch.Tensor]]) -> None:
        self.modules = modules
        self.modes = list(map(_training, modules))
        self.generators = generators
        self.buffers: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []

    def put_back(self) -> None:
        """The replay has ended, one way or the other."""
        for module, found in self.buffers:
            module._buffers.clear()
            module._buffers.update(found)
        if list(map(_training, self.modules)) != self.modes:  # forward's, or switched by a function that stopped
            for module, training in zip(self.modules, self.modes, strict=True):
                module.training = training
        for generator, state in self.generators:
            generator.set_state(state)


def _parameters(modules: list[nn.Module]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for module in modules:
        if module._parameters:
            found += [parameter for parameter in module._parameters.values() if parameter is not None]
    return found


def _modules(reached: Reach) -> list[nn.Module]:
    found = [module for _, module in reached.modules.values()]
    seen = set(map(id, found))
    for module in found:  # grows while it is walked
        if module._modules:
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    found.append(child)
    return found
