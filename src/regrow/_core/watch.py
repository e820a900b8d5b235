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
from regrow._core.copies import span_bytes
from regrow._core.faults import StateChangedError
from regrow._core.lifecycle import Replay

# What an operator is given, as far as it matters whether it is the same memory: storage, first and last byte.
_Place = tuple[int, int, int]


class Watch(TorchDispatchMode):
    """Sees every operator of one replay, and what it saves.

    Sees neither kernels that are launched past torch's dispatcher nor what Python reads of a tensor's memory; of
    compiled code it sees what that saves.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap the mode and import its compiler at the first operator, in the middle of a backward."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs compiled, and saves what it saved in forward."""
        return True

    def __init__(self, replay: Replay, changed: list[tuple[str, torch.Tensor]], rebound: list[tuple[str, Any]]) -> None:
        """Watch over tensors that were changed in place, and tensors that names stand for since forward."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._replay = replay
        # Held, so that no other tensor can take the place of one.
        self._changed = [(name, tensor, _place(tensor)) for name, tensor in changed]
        self._rebound = [(name, tensor, _place(tensor)) for name, tensor in rebound]

    def pack_hook(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """A pack hook that looks at what the replay saves: the last operator saves and never runs."""

        def watched(tensor: torch.Tensor) -> Any:
            self.look_at([tensor])
            return pack(tensor)

        return watched

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator unless it reads what was changed."""
        kwargs = kwargs or {}
        if not _reads_nothing(func):
            self.look_at(trees.tensors_in([args, kwargs]))
        return func(*args, **kwargs)

    def look_at(self, tensors: list[torch.Tensor]) -> None:
        """Refuse the replay if one of these was changed."""
        changed = _names_among(self._changed, tensors)
        rebound = _names_among(self._rebound, tensors)
        if changed or rebound:
            # Kept there, too: the function may swallow what is raised here.
            self._replay.refusal = StateChangedError(self._replay.label, changed, rebound)
            raise self._replay.refusal


def _names_among(watched: list[tuple[str, torch.Tensor, _Place | None]], tensors: list[torch.Tensor]) -> list[str]:
    places = [(tensor, _place(tensor)) for tensor in tensors]
    return list(
        dict.fromkeys(
            name
            for name, mine, place in watched
            if any(tensor is mine or _overlap(other, place) for tensor, other in places)
        )
    )


def _place(tensor: torch.Tensor) -> _Place | None:
    storage = compat.storage_key(tensor)
    if storage is None or tensor.layout is not torch.strided:
        return None
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return storage, begin, begin + span_bytes(tensor)


def _overlap(one: _Place | None, other: _Place | None) -> bool:
    return one is not None and other is not None and one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


@lru_cache(maxsize=4096)
def _reads_nothing(func: Any) -> bool:
    """Whether an operator makes a view, whose readers are seen, or asks only for shape and type."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    name = str(schema.name).rpartition("::")[2]
    is_view = any(value.alias_info is not None for value in schema.returns)
    return is_view or name.endswith("_like") or name.startswith("new_")
