"""Placeholder: in a replay, the output of a SAVE region that was not kept. Has a shape and no memory.

It may be looked at, viewed, taken as a pattern, and handed to another region; whatever would read its values is an
error that names the region. It is a tensor without storage, so code that works on shapes goes on working.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from regrow._core import compat, trees
from regrow._core.faults import PlaceholderError

# Shape, stride, type and device of the tensor that it stands for.
Look = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]


class Placeholder(torch.Tensor):
    """Stands for a tensor that a region made."""

    _region: str

    @staticmethod
    def __new__(cls, region: str, look: Look, requires_grad: bool = False) -> Placeholder:
        """Make one that looks like what ``region`` made."""
        shape, stride, dtype, device = look
        made: Placeholder = compat.tensor_without_storage(
            cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._region = region
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Without values, of which there are none."""
        return f"<output of SAVE region {self._region}, not kept: {tuple(self.shape)} {self.dtype}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Views are placeholders, too; everything else is misuse."""
        used = [tensor for tensor in trees.tensors_in([args, kwargs]) if isinstance(tensor, Placeholder)]
        here = used[0]
        if args and args[0] is here and _asks_for_shape(func):
            return func(_on_meta(here), *args[1:], **{"device": here.device, **(kwargs or {})})
        if not _makes_view(func) or args[0] is not here:
            raise PlaceholderError(here._region, str(func))
        out = func(_on_meta(here), *args[1:], **(kwargs or {}))
        made = [Placeholder(here._region, (*look_of(view)[:3], here.device)) for view in trees.tensors_in(out)]
        return made[0] if isinstance(out, torch.Tensor) else type(out)(made)


def look_of(tensor: torch.Tensor) -> Look:
    """What a placeholder needs to know of a tensor."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _on_meta(placeholder: Placeholder) -> torch.Tensor:
    return torch.empty_strided(placeholder.shape, placeholder.stride(), dtype=placeholder.dtype, device="meta")


@lru_cache(maxsize=4096)
def _asks_for_shape(func: Any) -> bool:
    """Whether an operator makes a new tensor after the shape and type of this one: ``zeros_like``, ``new_empty``."""
    name: str = func.__name__.partition(".")[0]
    return name.endswith("_like") or name.startswith("new_")


@lru_cache(maxsize=4096)
def _makes_view(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return (
        schema is not None and not schema.is_mutable and any(value.alias_info is not None for value in schema.returns)
    )
