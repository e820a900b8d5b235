"""The inputs of a call: tensors apart from the containers that hold them. Must never hold a tensor.

Tensors travel through MindSpore one by one, so that it saves each as a node would; a replay gets fresh containers, as
forward saw them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regrow.platform._mindspore import _compat
from regrow.platform._mindspore.faults import InputChangedError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes."""

    index: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of a call, without their tensors.

    Attributes:
        template: (args, kwargs), with a place for each tensor.
        names: of the tensors, as written in the call.
        versions: of the tensors, before forward.
    """

    template: Any
    names: list[str]
    versions: list[int]

    def filled(self, tensors: tuple[Any, ...]) -> Any:
        """(args, kwargs), in fresh containers."""
        return _filled(self.template, tensors)

    def check(self, label: str, tensors: tuple[Any, ...]) -> None:
        """InputChangedError if a tensor was changed in place since forward, as far as MindSpore counts changes."""
        now = [tensor._version for tensor in tensors]
        changed = [index for index, version in enumerate(self.versions) if version != now[index]]
        if changed:
            names = [self.names[index] for index in changed]
            details = [f"version {self.versions[index]} in forward, {now[index]} now" for index in changed]
            raise InputChangedError(label, names, details)


def taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Inputs]:
    """The tensors of a call, and the rest of it."""
    found: list[Any] = []
    names: list[str] = []
    template = (
        tuple(_taken(value, f"args[{index}]", found, names) for index, value in enumerate(args)),
        {name: _taken(value, name, found, names) for name, value in kwargs.items()},
    )
    return found, Inputs(template, names, [tensor._version for tensor in found])


def tensors_of(value: Any) -> list[Any]:
    """The tensors of an output."""
    found: list[Any] = []
    _taken(value, "", found, [])
    return found


def _taken(value: Any, name: str, found: list[Any], names: list[str]) -> Any:
    if isinstance(value, _compat.mindspore.Tensor):
        found.append(value)
        names.append(name)
        return Place(len(found) - 1)
    if type(value) is dict:
        return {key: _taken(item, f"{name}[{key!r}]", found, names) for key, item in value.items()}
    if type(value) in (list, tuple) or _is_named(value):
        items = [_taken(item, f"{name}[{index}]", found, names) for index, item in enumerate(value)]
        return _same_kind(value, items)
    return value


def _filled(template: Any, tensors: tuple[Any, ...]) -> Any:
    if isinstance(template, Place):
        return tensors[template.index]
    if type(template) is dict:
        return {key: _filled(item, tensors) for key, item in template.items()}
    if type(template) in (list, tuple) or _is_named(template):
        return _same_kind(template, [_filled(item, tensors) for item in template])
    return template


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _same_kind(value: Any, items: list[Any]) -> Any:
    return type(value)(*items) if _is_named(value) else type(value)(items)
