"""Watch: refuses a replay that reads what was changed since forward. Must never run unless something was changed.

A function may reach a whole model and use one block of it; an optimiser that steps inside backward, a frozen average,
another stage's weights may have been changed by then, and no replay that leaves them alone is any the worse. So what
was changed is not refused where it is reached, but where an operator of the replay is given it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regrow._core import compat, trees
from regrow._core.faults import StateChangedError
from regrow._core.lifecycle import Replay


class Watch(TorchDispatchMode):
    """Sees every operator of one replay, and what it saves.

    Sees neither kernels that are launched past torch's dispatcher nor what Python reads of a tensor's memory.
    """

    supports_higher_order_operators = True

    def __init__(self, replay: Replay, changed: list[tuple[str, torch.Tensor]], rebound: list[tuple[str, Any]]) -> None:
        """Watch over tensors that were changed in place, and tensors that names stand for since forward."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._replay = replay
        self._alive = changed, rebound  # so that no other tensor can take the place of one
        self._changed = {key: name for name, tensor in changed for key in _keys(tensor)}
        self._rebound = {key: name for name, tensor in rebound for key in _keys(tensor)}

    def pack_hook(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """A pack hook that looks at what the replay saves: the last operator saves and never runs."""

        def watched(tensor: torch.Tensor) -> Any:
            self._look_at([tensor])
            return pack(tensor)

        return watched

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator unless it reads what was changed."""
        kwargs = kwargs or {}
        if not _is_view(func):  # what reads the view is seen
            self._look_at(trees.tensors_in([args, kwargs]))
        return func(*args, **kwargs)

    def _look_at(self, tensors: list[torch.Tensor]) -> None:
        keys = {key for tensor in tensors for key in _keys(tensor)}
        changed = [name for key, name in self._changed.items() if key in keys]
        rebound = [name for key, name in self._rebound.items() if key in keys]
        if changed or rebound:
            names = list(dict.fromkeys(changed)), list(dict.fromkeys(rebound))
            # Kept there, too: the function may swallow what is raised here.
            self._replay.refusal = StateChangedError(self._replay.label, *names)
            raise self._replay.refusal


def _keys(tensor: torch.Tensor) -> list[tuple[str, int]]:
    storage = compat.storage_key(tensor)
    return [("tensor", id(tensor))] if storage is None else [("tensor", id(tensor)), ("storage", storage)]


@lru_cache(maxsize=4096)
def _is_view(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(value.alias_info is not None for value in schema.returns)
