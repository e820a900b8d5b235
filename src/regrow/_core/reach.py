"""Reach: modules, tensors and generators that a function can see without being given them. Must never look further.

Looked at: the function itself, what it is bound to, what a partial holds, its closure, its defaults, the globals it
names, and modules and generators among its arguments; functions into the functions they close over, and lists, tuples
and dicts one level deep for modules and generators. Not looked at: attributes of objects that are no modules, tensors
in containers (a function that closes over a list rarely uses all of it), and what called functions see.
"""

from __future__ import annotations

import dis
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_LEAVES = (torch.Tensor, nn.Module, torch.Generator)
_IN_CONTAINERS = (nn.Module, torch.Generator)
_BORING = frozenset({int, float, bool, str, bytes, type(None), type, type(torch), type(len)})
_FUNCTIONS = frozenset({FunctionType, MethodType, partial})
_CONTAINERS = frozenset({list, tuple, dict})
_DEPTH = 3


class Reach:
    """What a function reaches, each thing once, with the name it is reached by.

    Attributes:
        function: the function, and what lies among its arguments that are no tensors.
        names: what each name stands for, of those that lead straight to a tensor or a module.
    """

    __slots__ = ("function", "generators", "modules", "names", "opaque", "tensors")

    def __init__(self, function: Any, opaque: tuple[Any, ...]) -> None:
        self.function = function
        self.opaque = opaque
        self.names: dict[str, int] = {}
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.generators: dict[int, torch.Generator] = {}

    def add(self, name: str, value: Any) -> None:
        """Note one thing."""
        if isinstance(value, nn.Module):
            self.modules.setdefault(id(value), (name, value))
        elif isinstance(value, torch.Generator):
            self.generators.setdefault(id(value), value)
        else:
            self.tensors.setdefault(id(value), (name, value))

    def rebound(self) -> list[str]:
        """Names that stand for another tensor or module now: a variable of a loop, a global that was set anew.

        A name that the function itself sets is the user's own state.
        """
        again = reach(self.function, self.opaque)
        now = {} if again is None else again.names
        if now == self.names:
            return []
        own = _set_by(self.function)
        return [name for name, value in self.names.items() if now.get(name) != value and name not in own]


def reach(function: Any, opaque: tuple[Any, ...]) -> Reach | None:
    """What a function reaches, and what lies among its arguments that are no tensors; None if that is nothing."""
    seen = _seen_by(function)
    if opaque:
        seen += [("an argument", value) for value in opaque]
    if not seen:
        return None
    found = Reach(function, opaque)
    for name, value in seen:
        _add_leaves(found, name, value, _DEPTH)
    return found if found.modules or found.tensors or found.generators else None


def _add_leaves(found: Reach, name: str, value: Any, depth: int) -> None:
    kind = type(value)
    if isinstance(value, _LEAVES):
        found.add(name, value)
        found.names.setdefault(name, id(value))
    elif kind in _FUNCTIONS:
        if depth:
            for inner_name, inner in _seen_by(value):
                _add_leaves(found, inner_name, inner, depth - 1)
    elif kind in _CONTAINERS:
        for key, item in value.items() if kind is dict else enumerate(value):
            if isinstance(item, _IN_CONTAINERS):
                found.add(f"{name}[{key!r}]", item)


def _seen_by(function: Any) -> list[tuple[str, Any]]:
    """What a function sees, without what can hold nothing of interest."""
    kind = type(function)
    if kind is FunctionType:
        return _seen_by_code(function)
    if kind is MethodType:
        return [("self", function.__self__), *_seen_by(function.__func__)]
    if kind is partial:
        held = [(f"argument {index}", value) for index, value in enumerate(function.args)]
        return [*_seen_by(function.func), *held, *function.keywords.items()]
    return [("", function)] if isinstance(function, nn.Module) else []


def _seen_by_code(function: FunctionType) -> list[tuple[str, Any]]:
    seen: list[tuple[str, Any]] = []
    code = function.__code__
    if function.__closure__ is not None:
        for name, cell in zip(code.co_freevars, function.__closure__, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if type(value) not in _BORING:
                seen.append((name, value))
    if function.__defaults__ or function.__kwdefaults__:
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        seen += [("a default", value) for value in defaults if type(value) not in _BORING]
    namespace = function.__globals__
    for name in _globals_of(code):
        value = namespace.get(name)
        if type(value) not in _BORING:
            seen.append((name, value))
    return seen


@lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    names = (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def _set_by(function: Any) -> frozenset[str]:
    while type(function) is partial:
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return frozenset()
    steps = (step for step in dis.get_instructions(code) if step.opname in ("STORE_DEREF", "STORE_GLOBAL"))
    return frozenset(str(step.argval) for step in steps)
