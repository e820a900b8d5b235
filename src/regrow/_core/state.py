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
from regrow._core.faults import StateChangedError
from regrow._core.reach import Reach

# Up to this size a buffer is copied in every forward and put in place in every replay, changed or not: kernels such as
# batch normalisation write buffers without moving their version. Larger ones are kept only if a forward changes them.
SMALL_BYTES = 64 * 1024

_training = attrgetter("training")

# Large buffers that a forward was seen to leave alone or to change, by module, name and mode.
_changes: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()


class Buffer:
    """One buffer at the beginning of forward.

    Attributes:
        tensor: the module's own tensor, and its version, first before forward, then after it.
        start: a copy from before forward; None if none was taken, or none is needed.
        is_small: whether a replay begins with the copy without asking.
        changed: whether forward changed it.
    """

    __slots__ = ("changed", "is_small", "module", "name", "start", "tensor", "version")

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.module = module
        self.name = name
        self.tensor = tensor
        self.version = compat.version_of(tensor)
        self.is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
        self.changed = False
        kept = self.is_small or _changes.get(module, {}).get((name, module.training), True)
        self.start: torch.Tensor | None = tensor.detach().clone() if kept else None

    def after_forward(self) -> None:
        """Note whether forward changed it; a large one that it left alone is not kept, now and from now on."""
        now = self.module._buffers.get(self.name)
        self.changed = self.moved()
        if now is not None:
            self.tensor = now
            self.version = compat.version_of(now)
        if not self.is_small:
            _changes.setdefault(self.module, {})[self.name, self.module.training] = self.changed
            if not self.changed:
                self.start = None

    def needs_start(self) -> bool:
        """Whether a replay must begin with the copy from before forward."""
        return self.is_small or self.changed or self.moved()

    def moved(self) -> bool:
        """Whether the module has another tensor there, or the tensor another version, than last noted."""
        now = self.module._buffers.get(self.name)
        return now is not self.tensor or compat.version_of(self.tensor) != self.version


class State:
    """What one call reaches, as it was in forward.

    Memory: holds copies of small buffers, and of large ones that forward changes, until the graph of the call dies.
    """

    __slots__ = ("_buffers", "_fixed", "_generators", "_modes", "_modules", "_reached", "_versions")

    def __init__(self, reached: Reach) -> None:
        # A function may reach a whole model: lists and one pass each, and no names before one is needed.
        self._reached = reached
        self._modules = _modules(reached)
        self._modes = list(map(_training, self._modules))
        self._buffers = [
            Buffer(module, name, buffer)
            for module in self._modules
            if module._buffers
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._fixed: list[torch.Tensor] = [tensor for _, tensor in reached.tensors.values()]
        for module in self._modules:
            if module._parameters:
                self._fixed += [parameter for parameter in module._parameters.values() if parameter is not None]
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
        begun = Begun()
        for buffer in stale:
            assert buffer.start is not None
            begun.buffers.append((buffer.module, buffer.name, buffer.module._buffers.get(buffer.name)))
            buffer.module._buffers[buffer.name] = buffer.start.clone()
        if list(map(_training, self._modules)) != self._modes:
            begun.modes = [(module, module.training) for module in self._modules]
            for module, training in zip(self._modules, self._modes, strict=True):
                module.training = training
        for generator, state in self._generators:
            begun.generators.append((generator, generator.get_state()))
            generator.set_state(state)
        return begun

    def _lost(self) -> list[torch.Tensor]:
        now = compat.versions_of(self._fixed)
        if now == self._versions:
            return []
        moved = [self._fixed[index] for index in range(len(now)) if now[index] != self._versions[index]]
        node = compat.current_node()
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

    __slots__ = ("buffers", "generators", "modes")

    def __init__(self) -> None:
        self.buffers: list[tuple[nn.Module, str, torch.Tensor | None]] = []
        self.modes: list[tuple[nn.Module, bool]] = []
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []

    def put_back(self) -> None:
        """The replay has ended, one way or the other."""
        for module, name, tensor in self.buffers:
            module._buffers[name] = tensor
        for module, training in self.modes:
            module.training = training
        for generator, state in self.generators:
            generator.set_state(state)


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
