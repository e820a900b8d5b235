"""The inputs of a call, held from forward to the last replay as autograd would hold them. Must never copy one."""

from __future__ import annotations

from typing import Any

import torch

from regrow._core import compat
from regrow._core.faults import InputChangedError
from regrow._core.trees import Template


class Inputs:
    """The tensors of a call and the template to put them back into.

    Under saved-tensor hooks (``save_on_cpu``, a surrounding checkpoint) the tensors are saved through them, like any
    tensor a node saves; without hooks they are held with their version, to notice an in-place change.

    Memory: holds the tensors, or what the hooks made of them, until the frame dies.
    """

    __slots__ = ("_changed", "_held", "_template", "_versions")

    def __init__(self, tensors: list[torch.Tensor], template: Template) -> None:
        self._template = template
        self._held: list[Any] = tensors
        self._versions: list[int] | None = None
        self._changed: tuple[list[str], list[str]] | None = None
        if compat.surrounding_hooks() is None:
            self._versions = compat.versions_of(tensors)
        else:
            self._held = [compat.save_tensor(tensor) for tensor in tensors]

    def check_after_forward(self) -> None:
        """Drop inputs that forward itself overwrote: no replay can start from them any more.

        Such an input belongs to the graph that holds the call; holding it would be a cycle that nothing collects.
        """
        if self._versions is not None and compat.versions_of(self._held) != self._versions:
            self._changed = self._what_changed(self._versions)
            self._held = []

    def bring_back(self, label: str) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for a replay, in fresh containers; InputChangedError if one was changed in place."""
        if self._versions is None:
            return self._template.fill([saved.unpack() for saved in self._held])
        if self._changed is None and compat.versions_of(self._held) != self._versions:
            self._changed = self._what_changed(self._versions)
        if self._changed is not None:
            raise InputChangedError(label, *self._changed)
        return self._template.fill(self._held)

    def _what_changed(self, then: list[int]) -> tuple[list[str], list[str]]:
        now = compat.versions_of(self._held)
        names = self._template.names(len(now))
        moved = [index for index in range(len(now)) if now[index] != then[index]]
        details = [f"version {then[index]} before forward, {now[index]} now" for index in moved]
        return [names[index] for index in moved], details
