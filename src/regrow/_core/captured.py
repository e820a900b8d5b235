"""Captured: what a SAVE region sees without being given it, and may have changed. Must never hold it past the region.

A replay does not run the region, so a captured tensor that it writes, or a variable that it sets, would be the old one
behind it. What is deeper, in objects and their attributes, is not seen.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from regrow._core import compat
from regrow._core.closures import function_in
from regrow._core.reach import NOTHING, contents, reach, set_by


class Captured:
    """What a region's function sees, when the region begins.

    Attributes:
        storages: the memory of the tensors.
    """

    def __init__(self, function: Any, opaque: tuple[Any, ...]) -> None:
        found = reach(function, opaque)
        self._tensors = [] if found is None else list(found.tensors.values())
        self._versions = compat.versions_of([tensor for _, tensor in self._tensors])
        self.storages = {compat.storage_key(tensor) for _, tensor in self._tensors} - {None}
        self._function = function_in(function) if type(function) is not FunctionType else function
        self._variables = self._set_here()

    def written(self) -> list[str]:
        """The names of what has changed since."""
        now = compat.versions_of([tensor for _, tensor in self._tensors])
        moved = zip(self._tensors, self._versions, now, strict=True)
        variables = self._set_here()
        return [name for (name, _), then, version in moved if then != version] + [
            name for name, value in self._variables.items() if variables[name] is not value
        ]

    def _set_here(self) -> dict[str, Any]:
        """What stands in the variables outside itself that the function sets."""
        if self._function is None:
            return {}
        names = set_by(self._function.__code__)
        if not names:
            return {}
        cells = dict(zip(self._function.__code__.co_freevars, contents(self._function), strict=True))
        outside = {**self._function.__globals__, **cells}
        return {name: outside.get(name, NOTHING) for name in names}
