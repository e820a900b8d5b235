"""Arguments <-> tensors and a template, so that a replay gets the containers forward was given. Must never copy data.

Known containers (list, tuple, dict, their standard relatives, and what is registered with torch's pytree) are taken
apart; everything else is kept as it is, tensors inside it included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from regrow._core import compat

_ATOMS = frozenset({int, float, bool, str, type(None)})


class Place:
    """Stands in a template for the tensor with this index."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Branch:
    """Stands in a template for a container."""

    __slots__ = ("build", "children", "keys", "names")

    def __init__(self, kind: type, names: list[str]) -> None:
        self.names = names
        self.children: list[Any] = []
        self.keys: list[Any] = []
        self.build: Callable[[list[Any]], Any] = kind


class Template:
    """The arguments of one call without their tensors.

    Memory: holds every argument that is no tensor, and no tensor that stands in a known container.
    """

    __slots__ = ("args", "kwargs", "kwargs_names", "opaque")

    def __init__(
        self, args: list[Any], kwargs: list[Any], kwargs_names: tuple[str, ...], opaque: tuple[Any, ...]
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.kwargs_names = kwargs_names
        self.opaque = opaque  # what is neither a tensor nor a known container nor a number or text, wherever it lies

    def fill(self, tensors: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments again, in fresh containers."""
        if self is TENSORS_ONLY:
            return tensors, {}
        memo: dict[int, Any] = {}
        args = [_fill(node, tensors, memo) for node in self.args]
        kwargs = [_fill(node, tensors, memo) for node in self.kwargs]
        return args, dict(zip(self.kwargs_names, kwargs, strict=True))

    def names(self, n_tensors: int) -> list[str]:
        """How a user would write each tensor: ``argument 0``, ``mask``, ``state['h'][1]``."""
        if self is TENSORS_ONLY:
            return [f"argument {index}" for index in range(n_tensors)]
        found = [""] * n_tensors
        roots = [(f"argument {index}", node) for index, node in enumerate(self.args)]
        roots += list(zip(self.kwargs_names, self.kwargs, strict=True))
        for name, node in roots:
            for path, place in _places(name, node, set()):
                found[place.index] = path
        return found


# Of calls with nothing but positional tensors, which most are.
TENSORS_ONLY = Template([], [], (), ())


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Template]:
    """Take the arguments of a call apart."""
    if not kwargs:
        for value in args:
            if not isinstance(value, torch.Tensor):
                break
        else:
            return list(args), TENSORS_ONLY
    found = _Found()
    flat_args = [_take(value, found) for value in args]
    flat_kwargs = [_take(value, found) for value in kwargs.values()]
    return found.tensors, Template(flat_args, flat_kwargs, tuple(kwargs), tuple(found.opaque))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value that is a tensor or a known container of them."""
    found = _Found()
    _take(value, found)
    return found.tensors


def sharing_memory(value: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor in a value that lies in the memory of another: what a hook that copies nothing answers with."""
    storage = compat.storage_key(tensor)
    for found in tensors_in(value):
        if found is tensor or (storage is not None and compat.storage_key(found) == storage):
            return found
    return None


class _Found:
    """What lies in the arguments of one call, while they are taken apart."""

    __slots__ = ("branches", "opaque", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.opaque: list[Any] = []
        self.branches: dict[int, Branch] = {}


def _take(value: Any, found: _Found) -> Any:
    if isinstance(value, torch.Tensor):
        found.tensors.append(value)
        return Place(len(found.tensors) - 1)
    kind = type(value)
    if kind in _ATOMS:
        return value
    # One container passed twice, or one that holds itself, stays one container.
    branch = found.branches.get(id(value))
    if branch is not None:
        return branch
    opened = _open(kind, value)
    if opened is None:
        found.opaque.append(value)
        return value
    branch, children = opened
    found.branches[id(value)] = branch
    branch.children = [_take(child, found) for child in children]
    return branch


def _open(kind: type, value: Any) -> tuple[Branch, list[Any]] | None:
    if kind is dict:
        branch = Branch(dict, [f"[{key!r}]" for key in value])
        branch.keys = list(value)
        return branch, list(value.values())
    if issubclass(kind, tuple) and hasattr(kind, "_make") and hasattr(kind, "_fields"):
        if getattr(value, "__dict__", None):
            return None  # a subclass with attributes, which its fields do not bring back
        branch = Branch(kind, [f".{name}" for name in value._fields])
        branch.build = kind._make
        return branch, list(value)
    if kind is list or kind is tuple:
        return Branch(kind, [f"[{index}]" for index in range(len(value))]), list(value)
    node = compat.container_node(kind)
    return None if node is None else _open_registered(kind, value, *node)


def _open_registered(
    kind: type, value: Any, take_apart: Callable[..., Any], put_together: Callable[..., Any]
) -> tuple[Branch, list[Any]] | None:
    children, context = take_apart(value)
    if is_dataclass(kind) and len(children) < len(fields(kind)):
        return None  # registered without some of its fields, which would be lost
    branch = Branch(kind, [f"[{index}]" for index in range(len(children))])
    branch.build = partial(_put_together, put_together, context)
    return branch, list(children)


def _put_together(build: Callable[[list[Any], Any], Any], context: Any, parts: list[Any]) -> Any:
    return build(parts, context)


def _fill(node: Any, tensors: list[Any], memo: dict[int, Any]) -> Any:
    if type(node) is Place:
        return tensors[node.index]
    if type(node) is not Branch:
        return node
    if id(node) in memo:
        return memo[id(node)]
    # Lists and dicts are made before they are filled, so that one that holds itself does again.
    if node.build is list:
        items: list[Any] = memo.setdefault(id(node), [])
        items.extend(_fill(child, tensors, memo) for child in node.children)
        return items
    if node.build is dict:
        table: dict[Any, Any] = memo.setdefault(id(node), {})
        table.update((key, _fill(child, tensors, memo)) for key, child in zip(node.keys, node.children, strict=True))
        return table
    built = memo[id(node)] = node.build([_fill(child, tensors, memo) for child in node.children])
    return built


def _places(path: str, node: Any, seen: set[int]) -> Iterator[tuple[str, Place]]:
    if type(node) is Place:
        yield path, node
    elif type(node) is Branch and id(node) not in seen:
        seen.add(id(node))
        for name, child in zip(node.names, node.children, strict=True):
            yield from _places(path + name, child, seen)
