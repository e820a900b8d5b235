"""Which cells a function reaches: its own, those it closes over, globals, arguments. Must never call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from regrow.platform._mindspore import _compat


def cells(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The cells, by the name under which the function reaches them; the same cell may come more than once."""
    given = [(f"args[{index}]", value) for index, value in enumerate(args)]
    for name, value in [*_roots(function), *given, *kwargs.items()]:
        if isinstance(value, _compat.mindspore.nn.Cell):
            for inner, cell in value.cells_and_names():
                yield ".".join(part for part in (name, inner) if part), cell


def _roots(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, partial):
        yield from _roots(function.func)
        yield from ((f"args[{index}]", value) for index, value in enumerate(function.args))
        yield from function.keywords.items()
    elif isinstance(function, MethodType):
        yield "", function.__self__
        yield from _roots(function.__func__)
    elif isinstance(function, FunctionType):
        yield from _variables(function, function.__code__)
    else:
        yield "", function


def _variables(function: FunctionType, code: CodeType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not set yet
            yield name, cell.cell_contents
    yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
