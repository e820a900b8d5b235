"""The inputs of a call, held from forward to the last replay as autograd holds them. Copies inference tensors only."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from regrow._core import compat
from regrow._core.faults import InputChangedError
from regrow._core.trees import TENSORS_ONLY, Template, sharing_memory

_requires_grad = attrgetter("requires_grad")


class Inputs:
    """The tensors of a call and the template to put them back into.

    Under saved-tensor hooks (``save_on_cpu``, a surrounding checkpoint) the tensors are saved through them, like any
    tensor a node saves. What the hooks do not copy, and every tensor without hooks, is held with its version, to notice
    an in-place change. Inference tensors have no version, so a copy of them is held.

    Memory: holds the tensors, or what the hooks made of them, until the frame dies.
    """

    _changed: tuple[list[str], list[str]] | None = None
    _changed_with_grad = False
    # Set under hooks: what they made of each tensor, and which tensors of the call are held as they are.
    _saved: list[Any] | None = None
    _places: Sequence[int] = ()

    def __init__(self, tensors: list[torch.Tensor], template: Template) -> None:
        self._template = template
        self._versions = compat.versions_of(tensors)
        if compat.NO_VERSION in self._versions:
            tensors = [tensor.clone() if tensor.is_inference() else tensor for tensor in tensors]
            self._versions = compat.versions_of(tensors)
        self._held = tensors
        self._requires_grad = list(map(_requires_grad, tensors))
        if compat.surrounding_hooks() is not None:
            self._save_through_hooks(tensors)

    def check_after_forward(self) -> None:
        """Drop inputs that forward itself overwrote: no replay can start from them any more.

        Such an input belongs to the graph that holds the call; holding it would be a cycle that nothing collects.
        """
        if compat.versions_of(self._held) != self._versions:
            self._note_change()

    @property
    def need_grad(self) -> bool:
        """Whether one of them needs a gradient."""
        return True in self._requires_grad

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of them."""
        return any(held is tensor for held in self._held)

    def storages(self, *, requires_grad: bool) -> frozenset[int]:
        """The memory of those that need a gradient, or of those that need none, as far as they are held as they are."""
        places = range(len(self._held)) if self._saved is None else self._places
        keys = [
            compat.storage_key(tensor)
            for place, tensor in zip(places, self._held, strict=True)
            if self._requires_grad[place] == requires_grad
        ]
        return frozenset(key for key in keys if key is not None)

    @property
    def opaque(self) -> tuple[Any, ...]:
        """What is neither a tensor nor a known container nor a number or text."""
        return self._template.opaque

    @property
    def contained(self) -> bool:
        """Whether anything but tensors was given, so that the function may have left something in it."""
        return self._template is not TENSORS_ONLY

    @property
    def changed_with_grad(self) -> bool:
        """Whether one that needs a gradient was changed in place."""
        return self._changed_with_grad

    @property
    def changes(self) -> tuple[list[str], list[str]]:
        """What was changed in place, and how; nothing if nothing was."""
        return self._changed or ([], [])

    def names(self) -> list[str]:
        """The arguments that `tensors` are."""
        if self._saved is None:
            return self._template.names(len(self._held))
        names = self._template.names(len(self._saved))
        return [names[place] for place in self._places]

    def tensors(self) -> list[torch.Tensor]:
        """What is held as it was given; not what surrounding hooks took away."""
        return self._held

    def bring_back(self, label: str) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """Tensors, and arguments in fresh containers, for a replay; InputChangedError if one was changed in place."""
        tensors = self._tensors(label)
        args, kwargs = self._template.fill(tensors)
        return tensors, args, kwargs

    def as_leaves(self, label: str) -> tuple[list[torch.Tensor | None], list[Any], dict[str, Any]]:
        """Arguments whose tensors are leaves of a new graph where they need a gradient, and these leaves by place.

        A tensor that is passed twice is one leaf; it stands at the first of its places.
        """
        tensors = self._tensors(label)
        if len(tensors) == 1 and self._template is TENSORS_ONLY and self._requires_grad[0]:
            leaf = tensors[0].detach().requires_grad_()  # as in many calls
            return [leaf], [leaf], {}
        leaves: list[torch.Tensor | None] = [None] * len(tensors)
        filled: list[Any] = list(tensors)
        known: dict[int, torch.Tensor] = {}
        for index, needs in enumerate(self._requires_grad):
            if needs:
                tensor = tensors[index]
                leaf = known.get(id(tensor))
                if leaf is None:
                    known[id(tensor)] = leaves[index] = leaf = tensor.detach().requires_grad_()
                filled[index] = leaf
        args, kwargs = self._template.fill(filled)
        return leaves, args, kwargs

    def _tensors(self, label: str) -> list[Any]:
        if self._changed is None and compat.versions_of(self._held) != self._versions:
            self._note_change()
        if self._changed is not None:
            raise InputChangedError(label, *self._changed)
        tensors = self._held if self._saved is None else [saved.unpack() for saved in self._saved]
        if list(map(_requires_grad, tensors)) != self._requires_grad:
            # Frozen or thawed since: the graph of forward does not change, so the replay records what forward did.
            tensors = list(map(_with_requires_grad, tensors, self._requires_grad))
        return tensors

    def _save_through_hooks(self, tensors: list[torch.Tensor]) -> None:
        through = [compat.save_tensor(tensor) for tensor in tensors]
        aliases = [sharing_memory(packed, tensor) for (_, packed), tensor in zip(through, tensors, strict=True)]
        self._saved = [saved for saved, _ in through]
        self._places = [index for index, alias in enumerate(aliases) if alias is not None]
        self._held = [alias for alias in aliases if alias is not None]
        self._versions = compat.versions_of(self._held)

    def _note_change(self) -> None:
        then, now = self._versions, compat.versions_of(self._held)
        places = range(len(now)) if self._saved is None else self._places
        names = self._template.names(len(now) if self._saved is None else len(self._saved))
        moved = [index for index in range(len(now)) if now[index] != then[index]]
        details = [f"version {then[index]} before forward, {now[index]} now" for index in moved]
        self._changed = [names[places[index]] for index in moved], details
        self._changed_with_grad = any(self._requires_grad[places[index]] for index in moved)
        self._held, self._versions, self._saved = [], [], None


def _with_requires_grad(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    return tensor if tensor.requires_grad == wanted else tensor.detach().requires_grad_(wanted)
