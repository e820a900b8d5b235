"""Closures: a function that sees in a replay what it saw in forward, although its variables were set anew since.

A closure reads its variables when it runs. In ``for layer in layers: h = checkpoint(lambda t: layer(t), h)`` every
replay would read the last layer. The replay therefore runs the same code over cells of its own, and so do functions
that the function closes over: what a decorator wraps.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from regrow._core.reach import contents, set_by

# What is put back. Anything else a frame would keep alive, and with it perhaps the result that holds the frame.
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.Size, BuiltinFunctionType})
_OTHERS = (torch.Tensor, nn.Module, FunctionType, MethodType, partial)
_DEPTH = 3


class _LeftAlone:
    """Stands for the content of a cell that is the user's own: empty, written by forward, or of another type."""


_LEFT_ALONE = _LeftAlone()


class Closure:
    """What stood in the cells of a function when forward returned.

    Memory: holds captured tensors and modules until the frame dies, as if they were arguments.
    """

    __slots__ = ("_contents", "_function", "_inner")

    def __init__(self, function: FunctionType, written: Container[int], depth: int = _DEPTH) -> None:
        self._function = function
        self._contents = values = contents(function)
        self._inner: dict[int, Closure] | None = None
        if not _PLAIN.issuperset(map(type, values)):
            for index, value in enumerate(values):
                self._note(index, value, written, depth)

    def as_then(self) -> FunctionType:
        """The function itself, or one with the same code that sees what forward saw."""
        function = self._function
        now, wanted = contents(function), self._contents
        if list(map(id, now)) == list(map(id, wanted)) and self._inner is None:
            return function
        if self._inner is not None:
            wanted = list(wanted)
            for index, inner in self._inner.items():
                wanted[index] = inner.as_then()
        if all(map(_same, wanted, now)):
            return function
        code, namespace = function.__code__, function.__globals__
        own = set_by(code)  # goes on from where it is, as with torch
        cells = tuple(
            cell if _same(then, value) or name in own else CellType(then)
            for name, cell, then, value in zip(code.co_freevars, function.__closure__ or (), wanted, now, strict=True)
        )
        again = FunctionType(code, namespace, function.__name__, function.__defaults__, cells)
        again.__kwdefaults__ = function.__kwdefaults__
        return again

    def _note(self, index: int, value: Any, written: Container[int], depth: int) -> None:
        if type(value) in _PLAIN:
            return
        if not isinstance(value, _OTHERS) or id(value) in written:
            self._contents[index] = _LEFT_ALONE
        elif depth and type(value) is FunctionType and value.__closure__ is not None and value is not self._function:
            self._inner = self._inner or {}
            self._inner[index] = Closure(value, written, depth - 1)


def closure_of(function: Any, written: Container[int]) -> Closure | None:
    """What a function closes over; None if it has no cells.

    Args:
        function: any callable.
        written: ids of tensors that forward wrote into: they belong to the graph that holds the frame.
    """
    if type(function) is FunctionType and function.__closure__ is not None:
        return Closure(function, written)
    return None


def _same(then: Any, now: Any) -> bool:
    return then is now or then is _LEFT_ALONE
