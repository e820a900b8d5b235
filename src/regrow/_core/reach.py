"""Reach: modules, tensors and generators that a function can see without being given them. Must never look further.

Looked at: the function itself, what it is bound to, what a partial holds, its closure, its defaults, the globals it
names, and modules and generators among its arguments; functions into the functions they close over, and the first
items of lists, tuples and dicts for modules and generators. Not looked at: attributes of objects that are no modules,
tensors in containers (a function that closes over a list rarely uses all of it), and what called functions see.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import islice
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn

_LEAVES = (torch.Tensor, nn.Module, torch.Generator)
_IN_CONTAINERS = (nn.Module, torch.Generator)
_BORING = frozenset({int, float, bool, str, bytes, type(None), type, type(torch), type(len)})
_FUNCTIONS = frozenset({FunctionType, MethodType, partial})
_CONTAINERS = frozenset({list, tuple, dict})
_DEPTH = 3
# A function may close over a whole data set; it is asked at every call.
_ITEMS = 256

# What a function sees: a name, what it stands for, and the scope in which it may stand for something else by the
# replay. The cells of the function, and of the functions in them, may not: closures are put back. Nor may what is held.
Seen = tuple[str, Any, int]
Name = tuple[int, str]
_PUT_BACK = -1
_HELD = 0


class Reach:
    """What a function reaches, each thing once, with the name it is reached by.

    Attributes:
        names: the names that lead to a tensor or a module and may be set anew, each in its scope, and what they stand
            for, weakly.
        functions: the functions among it, by identity.
    """

    __slots__ = ("functions", "generators", "modules", "names", "tensors")

    def __init__(self) -> None:
        self.functions: dict[int, FunctionType] = {}
        self.names: dict[Name, ref[Any]] = {}
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

    def own(self) -> frozenset[str]:
        """Names that these functions set themselves."""
        return frozenset().union(*(set_by(function.__code__) for function in self.functions.values()))


def reach(function: Any, opaque: tuple[Any, ...], cells: list[Any] | None = None) -> Reach | None:
    """What a function reaches; None if that is nothing.

    Args:
        function: any callable.
        opaque: what lies among its arguments that is no tensor.
        cells: what the cells of a plain function hold, for whoever has looked already.
    """
    if type(function) is FunctionType and not opaque and _sees_nothing(function, cells):
        return None
    found = Reach()
    seen = _seen_by(function, found, fixed=True)
    if opaque:
        seen += [("an argument", value, _HELD) for value in opaque]
    if not seen:
        return None
    for name, value, scope in seen:
        _add_leaves(found, name, value, scope, _DEPTH)
    return found if found.modules or found.tensors or found.generators else None


def _sees_nothing(function: FunctionType, cells: list[Any] | None) -> bool:
    if function.__defaults__ or function.__kwdefaults__:
        return False
    namespace = function.__globals__
    for name in globals_of(function.__code__):
        if type(namespace.get(name)) not in _BORING:
            return False
    return function.__closure__ is None or (cells is not None and _BORING.issuperset(map(type, cells)))


def _add_leaves(found: Reach, name: str, value: Any, scope: int, depth: int) -> None:
    kind = type(value)  # of a proxy it is the proxy's, which is looked at no further
    if issubclass(kind, _LEAVES):
        found.add(name, value)
        if scope > _HELD and not issubclass(kind, torch.Generator):
            found.names.setdefault((scope, name), ref(value))
    elif kind in _FUNCTIONS:
        if depth:
            for inner_name, inner, inner_scope in _seen_by(value, found, fixed=scope == _PUT_BACK):
                _add_leaves(found, inner_name, inner, inner_scope, depth - 1)
    elif kind in _CONTAINERS:
        for key, item in islice(value.items() if kind is dict else enumerate(value), _ITEMS):
            if issubclass(type(item), _IN_CONTAINERS):
                found.add(f"{name}[{key!r}]", item)


def _seen_by(function: Any, found: Reach, *, fixed: bool) -> list[Seen]:
    """What a function sees, without what can hold nothing of interest; ``fixed``: its cells are put back."""
    kind = type(function)
    if kind is FunctionType:
        if id(function) in found.functions:
            return []
        found.functions[id(function)] = function
        return _seen_by_code(function, fixed)
    if kind is MethodType:
        return [("self", function.__self__, _HELD), *_seen_by(function.__func__, found, fixed=fixed)]
    if kind is partial:
        held = [(f"argument {index}", value, _HELD) for index, value in enumerate(function.args)]
        named = [(name, value, _HELD) for name, value in function.keywords.items()]
        return [*_seen_by(function.func, found, fixed=fixed), *held, *named]
    return [("", function, _HELD)] if issubclass(kind, nn.Module) else []


def _seen_by_code(function: FunctionType, fixed: bool) -> list[Seen]:
    seen: list[Seen] = []
    code = function.__code__
    if function.__closure__ is not None:
        values = contents(function)
        if not _BORING.issuperset(map(type, values)):
            scope = _PUT_BACK if fixed else id(function)
            seen += [(name, value, scope) for name, value in zip(code.co_freevars, values, strict=True)]
    if function.__defaults__ or function.__kwdefaults__:
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        seen += [("a default", value, _HELD) for value in defaults if type(value) not in _BORING]
    namespace = function.__globals__
    for name in globals_of(code):
        value = namespace.get(name)
        if type(value) not in _BORING:
            seen.append((name, value, id(namespace)))
    return seen


cell_contents = attrgetter("cell_contents")


class _Nothing:
    """Stands for the content of a cell that has none."""


NOTHING = _Nothing()


def contents(function: FunctionType) -> list[Any]:
    """What stands in the cells of a function."""
    cells = function.__closure__ or ()
    try:
        return list(map(cell_contents, cells))
    except ValueError:
        return [content(cell) for cell in cells]


def content(cell: CellType) -> Any:
    """What stands in a cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING


@lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> tuple[str, ...]:
    """The globals that code names, and that of functions it defines."""
    names = (
        step.argval for part in _parts(code) for step in dis.get_instructions(part) if step.opname == "LOAD_GLOBAL"
    )
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str) and not hasattr(builtins, name)))


@lru_cache(maxsize=4096)
def set_by(code: CodeType) -> frozenset[str]:
    """The names outside itself that a function sets, by its own code or by that of functions it defines."""
    steps = ((part, step) for part in _parts(code) for step in dis.get_instructions(part))
    return frozenset(
        str(step.argval)
        for part, step in steps
        if step.opname == "STORE_GLOBAL" or (step.opname == "STORE_DEREF" and step.argval in part.co_freevars)
    )


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
