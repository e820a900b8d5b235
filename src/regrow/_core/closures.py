"""Closures: a function that sees in a replay what it saw in forward, although its variables were set anew since.

A closure reads its variables when it runs. In ``for layer in layers: h = checkpoint(lambda t: layer(t), h)`` every
replay would read the last layer. The replay therefore runs the same code over cells of its own, and so do functions
that the function closes over: what a decorator wraps.
"""

from __future__ import annotations

from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from regrow._core import compat
from regrow._core.reach import set_by

# What is put back. Anything else a frame would keep alive, and with it perhaps the result that holds the frame.
_PUT_BACK = (
    torch.Tensor,
    nn.Module,
    int,
    float,
    str,
    type(None),
    torch.dtype,
    torch.Size,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    partial,
)
_DEPTH = 3


class _LeftAlone:
    """Stands for the content of a cell that is the user's own: empty, set by the function, or of another type."""


_LEFT_ALONE = _LeftAlone()


class Closure:
    """What stood in the cells of a function when forward began.

    Memory: holds captured tensors and modules until the frame dies, as if they were arguments.
    """

    __slots__ = ("_contents", "_function", "_inner", "_versions")

    def __init__(self, function: FunctionType, depth: int = _DEPTH) -> None:
        self._function = function
        self._contents = self._cells()
        own = set_by(function.__code__)
        if own:
            for index, name in enumerate(function.__code__.co_freevars):
                if name in own:
                    self._contents[index] = _LEFT_ALONE
        self._versions = [
            compat.version_of(value) if isinstance(value, torch.Tensor) else 0 for value in self._contents
        ]
        self._inner: dict[int, Closure] = {}
        if depth:
            for index, value in enumerate(self._contents):
                if type(value) is FunctionType and value.__closure__ is not None and value is not function:
                    self._inner[index] = Closure(value, depth - 1)

    def after_forward(self) -> None:
        """What forward itself set, or wrote into, is the user's own."""
        for index, (then, now) in enumerate(zip(self._contents, self._cells(), strict=True)):
            if now is not then or (isinstance(then, torch.Tensor) and compat.version_of(then) != self._versions[index]):
                self._contents[index] = _LEFT_ALONE
                self._inner.pop(index, None)
        for inner in self._inner.values():
            inner.after_forward()

    def as_then(self) -> FunctionType:
        """The function itself, or one with the same code that sees what forward saw."""
        function = self._function
        now = self._cells()
        wanted = self._contents
        if self._inner:
            wanted = list(wanted)
            for index, inner in self._inner.items():
                wanted[index] = inner.as_then()
        if all(map(_same, wanted, now)):
            return function
        cells = tuple(
            cell if _same(then, value) else CellType(then)
            for cell, then, value in zip(function.__closure__ or (), wanted, now, strict=True)
        )
        code, namespace = function.__code__, function.__globals__
        again = FunctionType(code, namespace, function.__name__, function.__defaults__, cells)
        again.__kwdefaults__ = function.__kwdefaults__
        return again

    def _cells(self) -> list[Any]:
        return list(map(_content, self._function.__closure__ or ()))


def closure_of(function: Any) -> Closure | None:
    """What a function closes over; None if it has no cells."""
    return Closure(function) if type(function) is FunctionType and function.__closure__ is not None else None


def _content(cell: CellType) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:
        return _LEFT_ALONE
    return value if isinstance(value, _PUT_BACK) else _LEFT_ALONE


def _same(then: Any, now: Any) -> bool:
    return then is now or then is _LEFT_ALONE
