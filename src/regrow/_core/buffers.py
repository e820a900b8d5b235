"""Buffers: those of the modules that a function reaches, as forward found them. Right in every replay, whoever writes.

A buffer is put in place of the module's own for the time of a replay, so the module's tensor is never written and its
version never moves.
"""

from __future__ import annotations

from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from regrow._core import compat
from regrow._core.copies import copies, span_bytes

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

# The buffers of a module: each with its version, and a copy of it if kernels may write it without moving that.
Mark = dict[str, tuple["torch.Tensor | None", int, "torch.Tensor | None"]]
Found = list[tuple[nn.Module, dict[str, torch.Tensor | None]]]
Copied = Found  # as they were when they were copied


# How many forwards leave a large buffer alone before it is no longer copied for them: a function may reach many modules
# whose turn comes later.
_CALLS = 64


class _Changes:
    """What forwards did to large buffers, by module, name and mode: how many left it alone; -1 once one changed it."""

    def __init__(self) -> None:
        # By identity: a module may define equality by value, or no hash.
        self._seen: dict[int, tuple[ref[nn.Module], dict[tuple[str, bool], int]]] = {}

    def may_change(self, module: nn.Module, name: str) -> bool:
        known = self._seen.get(id(module))
        return known is None or known[1].get((name, module.training), 0) < _CALLS

    def note(self, module: nn.Module, name: str, *, changed: bool) -> None:
        key = id(module)
        if key not in self._seen:
            self._seen[key] = ref(module, lambda _: self._seen.pop(key, None)), {}
        calls = self._seen[key][1]
        before = calls.get((name, module.training), 0)
        calls[name, module.training] = -1 if changed or before < 0 else before + 1


_changes = _Changes()


class Buffer:
    """One buffer at the beginning of forward.

    Attributes:
        start: a copy from before forward; None if none was taken, or none is needed.
        always: whether a replay begins with the copy without asking.
        changed: whether forward changed it.
    """

    __slots__ = ("_tensor", "_version", "always", "changed", "module", "name", "start")

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.module = module
        self.name = name
        # Weakly: forward may make its own result a buffer, and the result's graph holds the frame that holds this.
        self._tensor = ref(tensor)
        self._version = compat.version_of(tensor)
        self.always = span_bytes(tensor) <= SMALL_BYTES or isinstance(module, _NORMS)
        self.changed = False
        self.start: torch.Tensor | None = None

    def is_kept(self) -> bool:
        """Whether to copy it before forward."""
        return self.always or _changes.may_change(self.module, self.name)

    def after_forward(self) -> None:
        """Note whether forward changed it; a large one that it left alone is let go."""
        now = self.here()
        self.changed = self.moved()
        if now is not None:
            self._tensor = ref(now)
            self._version = compat.version_of(now)
        if not self.always:
            _changes.note(self.module, self.name, changed=self.changed)
            if not self.changed:
                self.start = None

    def needs_start(self) -> bool:
        """Whether a replay must begin with the copy from before forward."""
        return self.always or self.changed or self.moved()

    def moved(self) -> bool:
        """Whether the module has another tensor there, or the tensor another version, than last noted."""
        now = self.here()
        return now is not self._tensor() or (now is not None and compat.version_of(now) != self._version)

    def here(self) -> torch.Tensor | None:
        """What the module has there now."""
        return self.module._buffers.get(self.name)


class Buffers:
    """The buffers of some modules at the beginning of forward.

    Memory: holds copies of small buffers, and of large ones that forward changes.
    """

    __slots__ = ("_all", "_lazy", "_modules", "_nones")

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        # Which names there were; forward may fill one that was None, add some, or take some away.
        self._nones = {
            id(module): {name: tensor is None for name, tensor in module._buffers.items()}
            for module in modules
            if module._buffers
        }
        self._all: list[Buffer] = []
        self._lazy: list[tuple[nn.Module, str]] = []
        for module in modules:
            for name, tensor in module._buffers.items():
                if tensor is not None and is_lazy(tensor):
                    self._lazy.append((module, name))
                elif tensor is not None:
                    self._all.append(Buffer(module, name, tensor))
        _keep([buffer for buffer in self._all if buffer.is_kept()])

    def after_forward(self) -> None:
        """Note what forward changed."""
        for buffer in self._all:
            buffer.after_forward()
        if self._lazy:
            self._after_first_forward()

    def marks(self) -> list[Mark]:
        """How far the buffers of each module have come, to ask later what has moved since."""
        return [_mark(module) for module in self._modules]

    def moved_since(self, marks: list[Mark]) -> Copied:
        """Copies of the buffers of modules of which one has moved, come or gone since."""
        moved = [module for module, mark in zip(self._modules, marks, strict=True) if _has_moved(module, mark)]
        return [(module, _copied_by_name(module._buffers)) for module in moved]

    def owners(self) -> list[int]:
        """The ids of the modules that have some."""
        return list(self._nones)

    def stale(self) -> list[Buffer]:
        """Those that a replay must not find as they are now."""
        return [buffer for buffer in self._all if buffer.needs_start()]

    def place(self, stale: list[Buffer]) -> Found:
        """Put copies of forward's values in place; return what was there."""
        found = [
            (module, dict(module._buffers)) for module in self._modules if module._buffers or id(module) in self._nones
        ]
        for module, there in found:
            were_none = self._nones.get(id(module), {})
            module._buffers.clear()
            module._buffers.update(
                (name, None if was_none else there.get(name)) for name, was_none in were_none.items()
            )
        kept = [buffer for buffer in stale if buffer.start is not None]
        starts = _copied([buffer.start for buffer in kept if buffer.start is not None])
        for buffer, start in zip(kept, starts, strict=True):
            buffer.module._buffers[buffer.name] = start
        return found

    def _after_first_forward(self) -> None:
        """A lazy buffer had no value before; replays begin with the first one there is."""
        made = [(module, name, module._buffers.get(name)) for module, name in self._lazy]
        fresh = [
            Buffer(module, name, tensor) for module, name, tensor in made if tensor is not None and not is_lazy(tensor)
        ]
        for buffer in fresh:
            buffer.always = True
        _keep(fresh)
        self._all += fresh


def put_copies(wanted: Copied) -> None:
    """Give modules, for the time of a replay, copies of their buffers as they once were."""
    for module, there in wanted:
        copied = _copied_by_name(there)
        module._buffers.clear()
        module._buffers.update(copied)


def put_back(found: Found) -> None:
    """Give modules the buffers that a replay found."""
    for module, there in found:
        module._buffers.clear()
        module._buffers.update(there)


def _mark(module: nn.Module) -> Mark:
    if not module._buffers:
        return {}
    small = {
        name: tensor
        for name, tensor in module._buffers.items()
        if tensor is not None and not is_lazy(tensor) and span_bytes(tensor) <= SMALL_BYTES
    }
    copies_by_name = dict(zip(small, _copied(list(small.values())), strict=True))
    return {
        name: (tensor, compat.NO_VERSION if tensor is None else compat.version_of(tensor), copies_by_name.get(name))
        for name, tensor in module._buffers.items()
    }


def _has_moved(module: nn.Module, mark: Mark) -> bool:
    here = module._buffers
    if list(here) != list(mark):
        return True
    return any(
        here[name] is not then
        or (then is not None and compat.version_of(then) != version)
        or (then is not None and copy is not None and _differs(then, copy))
        for name, (then, version, copy) in mark.items()
    )


def _differs(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a kernel wrote it; where asking would wait for the device, what trains is taken to have been written."""
    if tensor.device.type != "cpu":
        return tensor.is_floating_point()
    with compat.without_dispatch_modes():
        return not torch.equal(tensor, copy)


def _copied_by_name(there: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    found = {name: tensor for name, tensor in there.items() if tensor is not None}
    copied = dict(zip(found, _copied(list(found.values())), strict=True))
    return {name: copied.get(name) for name in there}


def _keep(buffers: list[Buffer]) -> None:
    tensors = [tensor for tensor in (buffer.here() for buffer in buffers) if tensor is not None]
    for buffer, copy in zip(buffers, _copied(tensors), strict=True):
        buffer.start = copy


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that no dispatch mode sees: a policy around the call, or one that counts operators."""
    if not tensors:
        return []
    with compat.without_dispatch_modes():
        return copies(tensors)
