"""Closures: a function that sees in a replay what it saw in forward, although its variables were set anew since.

A closure reads its variables when it runs. In ``for layer in layers: h = checkpoint(lambda t: layer(t), h)`` every
replay would read the last layer. The replay therefore runs the same code over cells of its own, and so do the functions
that it closes over, what a decorator wraps among them. Functions that shared a variable go on sharing it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

from regrow._core.reach import NOTHING, cell_contents, content, contents, set_by

# Of these types nothing needs to be looked into, and most variables are.
_PLAIN = frozenset({int, float, bool, str, type, type(None), torch.dtype, torch.Size})


class Closure:
    """What stood in the cells of a function, and of those it closes over, when forward returned.

    Left alone are cells that are empty, that forward changed, that one of these functions sets, and those with a tensor
    that forward wrote: they go on from where they are.

    Memory: holds what the cells held until the frame dies, as if it were an argument.
    """

    __slots__ = ("_cells", "_function", "_then")

    def __init__(self, function: Any, found: FunctionType, before: list[Any], written: Container[int]) -> None:
        self._function = function
        self._cells: list[CellType] = list(found.__closure__ or ())
        self._then = [now if now is was else NOTHING for was, now in zip(before, contents(found), strict=True)]
        self._look_inside(found, written)

    def as_then(self) -> Any:
        """The function itself, or one with the same code that sees what forward saw."""
        return _rebuilt(self._function, self._cells, self._then)

    def _look_inside(self, found: FunctionType, written: Container[int]) -> None:
        functions = _functions_below(found)
        own = {
            id(cell)
            for function in functions
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            if name in set_by(function.__code__)
        }
        seen = set(map(id, self._cells))
        for function in functions[1:]:
            for cell in function.__closure__ or ():
                if id(cell) not in seen:
                    seen.add(id(cell))
                    self._cells.append(cell)
                    self._then.append(content(cell))
        for index, (cell, value) in enumerate(zip(self._cells, self._then, strict=True)):
            if id(cell) in own or id(value) in written:
                self._then[index] = NOTHING


def still_plain(function: Any, cells: list[Any]) -> bool:
    """Whether cells hold numbers and the like, and what they held before: then they need no closer look."""
    return _PLAIN.issuperset(map(type, cells)) and type(function) is FunctionType and _hold(function, cells)


def as_then(function: Any, cells: list[Any]) -> Any:
    """A function whose cells are `still_plain` after forward, as it was then."""
    if _hold(function, cells):
        return function
    own = set_by(function.__code__)
    then = [NOTHING if name in own else was for name, was in zip(function.__code__.co_freevars, cells, strict=True)]
    return _rebuilt(function, function.__closure__ or (), then)


def _hold(function: FunctionType, then: list[Any]) -> bool:
    """Whether the cells hold the same objects: what is equal may differ, as zeros of either sign do."""
    try:
        return all(map(is_, map(cell_contents, function.__closure__ or ()), then))
    except ValueError:  # one is empty
        return all(map(is_, contents(function), then))


def _rebuilt(function: Any, cells: Sequence[CellType], then: list[Any]) -> Any:
    changed = {
        id(cell): was for cell, was in zip(cells, then, strict=True) if was is not NOTHING and was is not content(cell)
    }
    return _Rebuilding(changed).rebuilt(function) if changed else function


class _Rebuilding:
    """Makes functions anew over cells that hold what they held in forward."""

    def __init__(self, changed: dict[int, Any]) -> None:
        self._changed = changed
        self._cells: dict[int, CellType] = {}
        self._made: dict[int, FunctionType] = {}

    def rebuilt(self, value: Any) -> Any:
        """A function, or a partial or method of one, over the right cells; anything else as it is."""
        function = function_in(value)
        if function is None or not self._is_stale(function):
            return value
        if type(value) is MethodType:
            return MethodType(self.rebuilt(value.__func__), value.__self__)
        if type(value) is partial:
            return partial(self.rebuilt(value.func), *value.args, **value.keywords)
        if id(function) not in self._made:
            self._make(function)
        return self._made[id(function)]

    def _make(self, function: FunctionType) -> None:
        fresh = [cell for cell in function.__closure__ or () if id(cell) not in self._cells and self._is_new(cell)]
        self._cells.update((id(cell), CellType()) for cell in fresh)
        cells = tuple(self._cells.get(id(cell), cell) for cell in function.__closure__ or ())
        again = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        again.__kwdefaults__ = function.__kwdefaults__
        again.__qualname__, again.__doc__, again.__module__ = (
            function.__qualname__,
            function.__doc__,
            function.__module__,
        )
        again.__dict__.update(function.__dict__)
        self._made[id(function)] = again  # before its cells are filled: it may stand in one of them
        for cell in fresh:
            self._cells[id(cell)].cell_contents = self.rebuilt(self._changed.get(id(cell), content(cell)))

    def _is_new(self, cell: CellType) -> bool:
        inner = function_in(content(cell))
        return id(cell) in self._changed or (inner is not None and self._is_stale(inner))

    def _is_stale(self, function: FunctionType) -> bool:
        return any(
            id(cell) in self._changed for below in _functions_below(function) for cell in below.__closure__ or ()
        )


def closure_of(function: Any, before: list[Any], written: Container[int]) -> Closure:
    """What a function closes over.

    Args:
        function: any callable that `cells_of` found cells in.
        before: what they held before forward.
        written: ids of tensors that forward wrote into: they belong to the graph that holds the frame.
    """
    found = function if type(function) is FunctionType else function_in(function)
    assert found is not None
    return Closure(function, found, before, written)


def cells_of(function: Any) -> list[Any] | None:
    """What the cells of a function hold now; None if it has none."""
    if type(function) is FunctionType:
        return None if function.__closure__ is None else contents(function)
    found = function_in(function)
    return None if found is None else contents(found)


def function_in(value: Any) -> FunctionType | None:
    """The function with cells that is called in the end."""
    kind = type(value)
    while kind is partial or kind is MethodType:
        value = value.func if kind is partial else value.__func__
        kind = type(value)
    return value if kind is FunctionType and value.__closure__ is not None else None


def _functions_below(function: FunctionType) -> list[FunctionType]:
    """A function and those it closes over, each once."""
    found, seen = [function], {id(function)}
    for here in found:  # grows while it is walked
        for value in contents(here):
            inner = function_in(value)
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                found.append(inner)
    return found
