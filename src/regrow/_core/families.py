"""Which operators belong together, and how an operator is named. Must never ask for one that torch may lack.

By name, because a torch version may lack some, and others are registered when a library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from regrow._core import compat

_MATMULS = frozenset(
    f"aten.{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "matmul",
        "linear",
        "mv",
        "addmv",
        "_addmm_activation",
        "_int_mm",
        "_scaled_mm",
        "_scaled_mm_v2",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_scaled_grouped_mm_v2",
        "_foreach_mm",
        "_cslt_sparse_mm",
        "_sparse_semi_structured_mm",
        "_sparse_semi_structured_addmm",
    )
)
_ATTENTION = frozenset(
    {
        "aten.scaled_dot_product_attention",
        "aten._scaled_dot_product_attention_math",
        "aten._scaled_dot_product_attention_math_for_mps",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._cudnn_attention_forward",
        "aten._efficient_attention_forward",
        "aten._flash_attention_forward",
        "torch_attn._varlen_attn",
        "higher_order.flex_attention",
    }
)


def is_matmul(op: Any) -> bool:
    """Whether an operator is a product of matrices, any overload of it."""
    return _without_overload(op) in _MATMULS


def is_attention(op: Any) -> bool:
    """Whether an operator is the whole of attention, on whatever device."""
    return _without_overload(op) in _ATTENTION


def is_random(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers, which attention does where its dropout is not 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    place = _place_of_dropout(op)
    if place is None:
        return True
    return bool((args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) != 0)


def path_of(op: Any) -> str:
    """Where an operator is found under ``torch.ops``."""
    return f"{op.namespace}.{op.name()}" if isinstance(op, compat.HigherOrderOperator) else str(op)


def operator_at(path: str) -> Any:
    """The operator that `path_of` named, perhaps in another process; ValueError if this one does not know it."""
    found: Any = torch.ops
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ValueError(
            f"operators: the policy was pickled with torch.ops.{path}, which this process does not know. "
            "Import the library that registers it first."
        ) from None
    return found


@lru_cache(maxsize=4096)
def _place_of_dropout(op: Any) -> int | None:
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


@lru_cache(maxsize=4096)
def _without_overload(op: Any) -> str:
    return path_of(op) if isinstance(op, compat.HigherOrderOperator) else path_of(op).rpartition(".")[0]
