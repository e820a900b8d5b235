"""Reach: modules, tensors and generators that a function can see without being given them. Must never look further.

Looked at: the function itself, what it is bound to, what a partial holds, its closure, the globals it names, and
modules among its arguments; each one level deep into lists, tuples and dicts, and functions into the functions they
close over. Not looked at: attributes of objects that are no modules, and what called functions see.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_LEAVES = (torch.Tensor, nn.Module, torch.Generator)
_BORING = frozenset({int, float, bool, str, bytes, type(None), type, type(torch)})
_FUNCTIONS = frozenset({FunctionType, MethodType, partial})
_CONTAINERS = frozenset({list, tuple, dict})
_DEPTH = 3


class Reach:
    """What a function reaches, each thing once, with the name it is reached by."""

    __slots__ = ("generators", "modules", "tensors")

    def __init__(self) -> None:
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


def reach(function: Any, opaque: list[Any]) -> Reach | None:
    """What a function reaches, and what lies among its arguments that are no tensors; None if that is nothing."""
    found: Reach | None = None
    for name, value in (*_seen_by(function), *(("an argument", value) for value in opaque)):
        for leaf_name, leaf in _leaves(name, value, _DEPTH):
            found = found or Reach()
            found.add(leaf_name, leaf)
    return found


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind in _BORING or depth == 0:
        return
    if isinstance(value, _LEAVES):
        yield name, value
    elif kind in _FUNCTIONS:
        for inner_name, inner in _seen_by(value):
            yield from _leaves(inner_name, inner, depth - 1)
    elif kind in _CONTAINERS:
        items = value.items() if kind is dict else enumerate(value)
        yield from ((f"{name}[{key!r}]", item) for key, item in items if isinstance(item, _LEAVES))


def _seen_by(function: Any) -> Iterator[tuple[str, Any]]:
    kind = type(function)
    if kind is FunctionType:
        yield from _seen_by_code(function)
    elif kind is MethodType:
        yield "self", function.__self__
        yield from _seen_by(function.__func__)
    elif kind is partial:
        yield from _seen_by(function.func)
        yield from ((f"argument {index}", value) for index, value in enumerate(function.args))
        yield from function.keywords.items()
    elif isinstance(function, nn.Module):
        yield "", function


def _seen_by_code(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, namespace = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell that is not filled yet
            yield name, cell.cell_contents
    for name in _globals_of(code):
        if name in namespace:
            yield name, namespace[name]


@lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    names = (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))
