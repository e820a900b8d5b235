"""Becoming: a module turns into an instance of a subclass of its class. Must never add a level to a module's names.

The module stays the same object, so names of parameters, buffers and state, attributes, hooks and ``isinstance`` are
its own, and nothing points back from it: it dies with its last reference. It copies and pickles as its own class does,
and the copy is what the module became.

A limit that comes with it: torch's parametrizations change the class as well. Wrap first, parametrize then; the other
order works until the parametrization is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.fx
from torch import nn

# What a module became, and what it became so with, in its own dict: parts of it that the class makes have neither.
_KIND = "_regrow_kind"
STATE = "_regrow_state"

# What a subclass has other than its base: a function at the top of a module, since copies and pickles name it.
Kind = Callable[[Any], dict[str, Any]]


def become(module: nn.Module, kind: Kind, state: Any) -> nn.Module:
    """Turn a module into what ``kind`` makes of its class, with ``state`` for that."""
    module.__dict__[_KIND] = kind
    module.__dict__[STATE] = state
    module.__class__ = _subclass(type(module), kind)
    return module


def check_free(module: nn.Module, name: str) -> None:
    """Refuse a module that has become something already, or whose class does not say what it runs.

    Raises:
        ValueError: the sentence names the module and what to do.
    """
    if _KIND in module.__dict__:
        raise ValueError(f"{name} is wrapped already: {type(module).__name__}. Wrap each module once.")
    if isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule)):
        raise ValueError(
            f"{name} is a traced or scripted {type(module).__name__}, whose forward is generated code that a wrapper "
            "would not reach. "
            "Wrap the module before it is traced or scripted, or wrap a function that calls it."
        )
    if "forward" in module.__dict__:
        raise ValueError(
            f"{name} has a forward of its own instance, which a wrapper would not reach. "
            "Wrap the module before that forward is set, or wrap the function itself."
        )


class _Became:
    """What such classes have in common: how they are made, copied and pickled."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Stop here: classes that keep a register of their subclasses are not told of these."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = type(self)._regrow_base  # type: ignore[attr-defined]
        reduced: Any = super().__reduce_ex__(protocol)
        rebuild, args, *rest = reduced
        args = tuple(base if arg is type(self) else arg for arg in args)
        own: dict[str, Any] = self.__dict__
        return _rebuilt, (rebuild, args, own[_KIND], own[STATE]), *rest


# Weakly on both sides: a subclass lives as long as its base or a module of it.
_subclasses: WeakKeyDictionary[Any, dict[Kind, ref[Any]]] = WeakKeyDictionary()


def _subclass(base: Any, kind: Kind) -> Any:
    known = _subclasses.setdefault(base, {})
    cls = known[kind]() if kind in known else None
    if cls is None:
        cls = _new_subclass(base, kind)
        known[kind] = ref(cls)
    return cls


def _new_subclass(base: Any, kind: Kind) -> Any:
    fields = {"__module__": base.__module__, "__doc__": base.__doc__, "_regrow_base": base, **kind(base)}
    becomes = getattr(base, "cls_to_become", None)  # of a lazy module, once it has seen an input
    if becomes is not None:
        fields["cls_to_become"] = _subclass(becomes, kind)
    return type(f"{kind.__name__.strip('_').title()}{base.__name__}", (_Became, base), fields)


def _rebuilt(rebuild: Callable[..., nn.Module], args: tuple[Any, ...], kind: Kind, state: Any) -> nn.Module:
    """A module that became something, from what its own class says of how it is copied and pickled."""
    return become(rebuild(*args), kind, state)
