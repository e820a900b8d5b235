"""Names of modules in messages, as the checkpointed function reaches them. Must never keep a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from regrow._core.reach import reach

_OWN = ("self", "argument 0", "")  # the module that is checkpointed itself: names are its own


class Names:
    """The names of the modules that a function reaches, by identity."""

    def __init__(self, function: Callable[..., Any], opaque: tuple[Any, ...]) -> None:
        self._names: dict[int, str] = {}
        reached = reach(function, opaque)
        for root, module in () if reached is None else reached.modules.values():
            own = "" if root in _OWN else root
            for name, part in module.named_modules():
                self._names.setdefault(id(part), ".".join(filter(None, (own, name))))

    def of(self, modules: Sequence[nn.Module]) -> str:
        """The innermost of the modules that are running: ``mlp.up (Linear)``; empty where none is."""
        if not modules:
            return ""
        kind = getattr(type(modules[0]), "_regrow_base", type(modules[0])).__name__  # a wrapped class is its own
        name = self._names.get(id(modules[0]), "")
        return f"{name} ({kind})" if name else kind
