"""Hidden: tensors in an object that cannot be taken apart. Kept as it is, it would keep the graph that keeps it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

_ENDS = (type, ModuleType, CodeType, str, bytes, nn.Parameter)
_MOST = 1000


def tensors_in(value: Any) -> str | None:
    """What an object hides: a word for messages, None if nothing that needs a gradient or is used up by reading."""
    if isinstance(value, Iterator):
        return "an iterator, which is read only once"
    return "tensors inside" if any(map(_has_graph, islice(_below(value), _MOST))) else None


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _below(value: Any) -> Iterator[Any]:
    """What an object refers to, itself first; not what modules, classes and globals do."""
    seen, waiting = {id(value)}, [value]
    for here in waiting:  # grows while it is walked
        yield here
        if isinstance(here, (torch.Tensor, *_ENDS)):
            continue
        below = [here.__closure__, here.__defaults__] if isinstance(here, FunctionType) else gc.get_referents(here)
        for item in below:
            if id(item) not in seen:
                seen.add(id(item))
                waiting.append(item)
