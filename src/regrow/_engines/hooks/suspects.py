"""Suspects: what may have made a replay differ, with the evidence that there is. Must never keep a tensor.

In the order in which they are usual: global state, autocast, random numbers, data-dependent branches, inputs changed in
place. Those with evidence come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from regrow._core.reach import globals_of, reach
from regrow._engines.hooks.fingerprints import fingerprint
from regrow._engines.hooks.oplog import Operator, OperatorLog

_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class Scene:
    """What a function could see of plain values before its forward, to be compared with what it sees later.

    Attributes:
        inputs: fingerprints of the tensors of the call, in the order of the call.
    """

    def __init__(self, function: Callable[..., Any], opaque: tuple[Any, ...], inputs: Sequence[torch.Tensor]) -> None:
        self.values = _values(function, opaque)
        self.inputs = _fingerprints(inputs)

    def changed(self, now: Scene) -> list[str]:
        """Which plain values are others now."""
        then = self.values
        return [
            f"{name} was {then[name]!r} in forward, is {value!r} now"
            for name, value in now.values.items()
            if name in then and (type(then[name]), then[name]) != (type(value), value) and value == value  # noqa: PLR0124
        ]

    def overwritten(self, now: Scene, names: Sequence[str]) -> list[str]:
        """Which inputs hold other bits now, though their versions have not moved."""
        pairs = zip(names, self.inputs, now.inputs, strict=False)
        return [name for name, then, here in pairs if then is not None and here is not None and then != here]


def causes(
    changed: Sequence[str], overwritten: Sequence[str], logs: tuple[OperatorLog, OperatorLog], index: int | None
) -> list[str]:
    """Sentences: what there is evidence for, in the usual order; then what else it may be."""
    forward, replay = (_at(log, index) for log in logs)
    before = [] if index is None else logs[1].operators[: index + 1]
    random = any(each is not None and each.random for each in (forward, replay))
    found = {
        "global state": "; ".join(changed),
        "autocast": _casts(forward, replay),
        "random numbers": "the first operator that differs draws random numbers: is its generator restored "
        "(preserve_rng_state, a generator of your own)?"
        if random
        else "",
        "data-dependent branches": _branches(before, forward, replay),
        "in-place changes of an input": ", ".join(overwritten)
        + " holds other values than in forward, without a move of its version (.data, numpy)"
        if overwritten
        else "",
    }
    if overwritten:  # it explains all the rest
        found = {key: value for key, value in found.items() if key.startswith("in-place")} | found
    evident = [f"{name}: {evidence}" for name, evidence in found.items() if evidence]
    return evident + [f"{name} (no sign of it)" for name, evidence in found.items() if not evidence]


def _at(log: OperatorLog, index: int | None) -> Operator | None:
    return None if index is None or index >= len(log.operators) else log.operators[index]


def _casts(forward: Operator | None, replay: Operator | None) -> str:
    if forward is None or replay is None:
        return ""
    ours, theirs = (_types(each) for each in (forward, replay))
    if ours == theirs:
        return ""
    return f"forward computed in {_listed(ours)}, the replay in {_listed(theirs)}: is autocast entered inside?"


def _types(operator: Operator) -> set[str]:
    words = f"{operator.takes} {operator.makes or ''}".replace(",", " ").split()
    return set(words).intersection(_FLOATS)


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names)) or "other types"


def _branches(before: Sequence[Operator], forward: Operator | None, replay: Operator | None) -> str:
    reads = [each for each in before if each.reads]
    if reads:
        return f"a value was read by {reads[-1].name} at {reads[-1].place()}: does the function branch on it?"
    if forward is not None and replay is not None and forward.module != replay.module:
        return f"forward went on in {forward.module or 'the function'}, the replay in {replay.module or 'the function'}"
    return ""


def _values(function: Any, opaque: tuple[Any, ...]) -> dict[str, Any]:
    """Plain values by name: globals that the function and the modules it reaches name, and attributes of those."""
    found: dict[str, Any] = {}
    reached = reach(function, opaque)
    parts: dict[int, tuple[str, nn.Module]] = {}
    for root, module in () if reached is None else reached.modules.values():
        own = "" if root in ("self", "argument 0", "") else root
        for name, part in module.named_modules():
            parts.setdefault(id(part), (".".join(filter(None, (own, name))), part))
    codes = [_plain(function), *(_plain(type(part).forward) for _, part in parts.values())]
    for plain in codes:
        if plain is not None:
            names = globals_of(plain.__code__)
            found.update({f"global {name}": plain.__globals__[name] for name in names if name in plain.__globals__})
    for path, part in parts.values():
        where = f"{path} " if path else "its "
        found.update({f"{where}attribute {name}": value for name, value in _attributes(part) if name[0] != "_"})
    target = getattr(function, "__self__", None) if isinstance(function, MethodType) else function
    if not isinstance(target, (nn.Module, FunctionType, partial)) and hasattr(target, "__dict__"):
        found.update({f"its attribute {name}": value for name, value in _attributes(target)})
    return {name: value for name, value in found.items() if isinstance(value, _SIMPLE)}


def _attributes(target: Any) -> Iterator[tuple[str, Any]]:
    """What an object has of its own, and from classes that are not torch's."""
    for cls in reversed(type(target).__mro__):
        if cls is not object and not cls.__module__.startswith("torch."):
            yield from vars(cls).items()
    yield from vars(target).items()


def _plain(function: Any) -> FunctionType | None:
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    if not isinstance(function, FunctionType) and callable(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004 - the method, not whether there is one
    found = unwrap(function) if callable(function) else None
    return found if isinstance(found, FunctionType) else None


def _fingerprints(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    return [fingerprint(tensor, sample=False) for tensor in tensors]
