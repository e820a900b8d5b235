"""Kept: the results that a selective policy keeps, each as it was when it was kept. Must never run an operator.

A kept tensor may be overwritten later, in forward, in a replay that was given it, or by the user. Where the write is
seen coming, the value is copied first; where it is not, the version tells, and the operator runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch

from regrow._core import compat
from regrow._core.trees import sharing_memory


class KeptTensor:
    """One kept tensor: an alias with its version, or what the surrounding saved-tensor hooks made of it."""

    __slots__ = ("_hooks", "_value", "_version", "_watched")

    def __init__(self, tensor: torch.Tensor, hooks: compat.Hooks | None) -> None:
        self._hooks = hooks
        self._set(compat.alias(tensor))

    def _set(self, tensor: torch.Tensor) -> None:
        self._value: Any = tensor if self._hooks is None else self._hooks[0](tensor)
        # None where hooks copied: that is protected, or theirs to keep.
        self._watched = tensor if self._hooks is None else sharing_memory(self._value, tensor)
        self._version = compat.version_of(tensor)

    def intact(self) -> bool:
        """Whether the value is still what it was."""
        return self._watched is None or compat.version_of(self._watched) == self._version

    def read(self) -> torch.Tensor:
        """A fresh alias."""
        return compat.alias(self._value if self._hooks is None else self._hooks[1](self._value))

    @property
    def here(self) -> torch.Tensor | None:
        """The value, where no hook copied it."""
        watched: torch.Tensor | None = self._watched
        return watched

    def protect(self, storage: int) -> None:
        """Copy the value if it lies in a storage that is about to be written."""
        if self.intact():
            value = self.read()
            if compat.storage_key(value) == storage:
                self._set(value.clone())


class Entry:
    """One operator of forward: what it was, and what was kept of it.

    Attributes:
        kept: its results with `KeptTensor` for tensors; None if it runs again.
        drawn: the generator state it left behind, if it is kept and draws random numbers.
        parameter: the argument of a cast that autocast may remember.
    """

    __slots__ = ("drawn", "func", "kept", "parameter")

    def __init__(self, func: Any, parameter: ref[torch.Tensor] | None) -> None:
        self.func = func
        self.kept: Any = None
        self.drawn: tuple[torch.device, torch.Tensor] | None = None
        self.parameter = parameter


class Kept:
    """What one call keeps. Belongs to its frame: filled in forward, read by every replay.

    Attributes:
        entries: forward's operators in order; None once forgotten.
        hooks: saved-tensor hooks of the user around the call, which kept tensors pass through.

    Memory: holds the kept results until the frame's graph dies or its session is cleared.
    """

    __slots__ = ("_in_storage", "_served", "complete", "entries", "hooks", "label", "preserve_rng")

    def __init__(
        self, label: str = "selective checkpointing", hooks: compat.Hooks | None = None, *, preserve_rng: bool = True
    ) -> None:
        self.label = label
        self.hooks = hooks
        self.preserve_rng = preserve_rng
        self.complete = False
        self.entries: list[Entry] | None = []
        self._in_storage: dict[int, list[KeptTensor]] = {}
        self._served: list[int] = []

    def forget(self) -> None:
        """Let go of everything; later replays run every operator."""
        self.entries = None
        self._in_storage = {}

    def keep(self, tensor: torch.Tensor) -> KeptTensor:
        """Keep one tensor."""
        kept = KeptTensor(tensor, self.hooks)
        self._note(tensor, kept)
        return kept

    def tensors(self) -> Iterator[torch.Tensor]:
        """What is kept and lies in memory as it was kept: not what hooks of the user took away."""
        for entry in self.entries or ():
            for kept in leaves(entry.kept):
                if kept.here is not None:
                    yield kept.here

    def serve(self, kept: KeptTensor) -> torch.Tensor:
        """Give a kept tensor to a replay, which may overwrite it."""
        tensor = kept.read()
        storage = compat.storage_key(tensor)
        if storage is not None and storage not in self._in_storage:
            self._served.append(storage)
        self._note(tensor, kept)
        return tensor

    def end_replay(self) -> None:
        """Forget where hooks of the user brought values back to: the next replay has them brought back anew."""
        for storage in self._served:
            self._in_storage.pop(storage, None)
        self._served.clear()

    def protect(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Copy kept values that an operator is about to overwrite."""
        if not self._in_storage or not func._schema.is_mutable:
            return
        for tensor in _written(func, args, kwargs):
            storage = compat.storage_key(tensor)
            if storage is not None:
                for kept in self._in_storage.pop(storage, ()):
                    kept.protect(storage)

    def _note(self, tensor: torch.Tensor, kept: KeptTensor) -> None:
        storage = compat.storage_key(tensor)
        if storage is not None:
            there = self._in_storage.setdefault(storage, [])
            if kept not in there:
                there.append(kept)


def leaves(value: Any) -> list[Any]:
    """The tensors, kept or not, in what an operator returned."""
    if isinstance(value, (torch.Tensor, KeptTensor)):
        return [value]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return []


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """What an operator returned, with each tensor changed."""
    if isinstance(value, (torch.Tensor, KeptTensor)):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(item, change) for item in value)
    return value


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    named = list(zip(func._schema.arguments, args, strict=False))
    named += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    written = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
    return [tensor for value in written for tensor in leaves(value)]
