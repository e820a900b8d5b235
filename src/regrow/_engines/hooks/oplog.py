"""The operators of one execution, for ``debug=True`` and for comparing values. Must never keep a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regrow._core import replaying, trees
from regrow._core.lines import modules_here, user_line
from regrow._engines.hooks.fingerprints import fingerprint
from regrow._engines.hooks.naming import Names
from regrow._engines.hooks.slots import describe, look

_CAST: Any = torch.ops.aten._to_copy.default
_UNSET = ("aten.empty", "aten.new_empty", "aten.resize")  # what they return is whatever lay there


@dataclass(slots=True)
class Operator:
    """One operator that ran.

    Attributes:
        takes: its tensors, described.
        makes: what it returned, described; None where it was stopped.
        module: the module that it ran in, empty for the function itself.
        line: the line of user code that called it.
        values: fingerprints of what it returned, where they are taken.
        random: it draws random numbers.
        reads: it brings a value to Python, which may branch on it.
    """

    name: str
    takes: str
    module: str
    line: str
    random: bool
    reads: bool
    makes: str | None = None
    values: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} -> {self.makes or 'nothing'}"

    def place(self) -> str:
        """Where it ran."""
        return f"{self.line}, module {self.module}" if self.module else self.line

    def looks_like(self, other: Operator) -> bool:
        """Whether both are the same operator on tensors of the same looks."""
        ends = self.makes is None or other.makes is None or self.makes == other.makes
        return (self.name, self.takes) == (other.name, other.takes) and ends


class OperatorLog(TorchDispatchMode):
    """What one execution runs, in order.

    Detaches are left out, for checkpointing adds its own, and so are casts of parameters, which autocast remembers.

    Attributes:
        sample: whether values are told apart by a sample; None where they are not looked at.
        names: of the modules that the function reaches.
    """

    def __init__(self, names: Names, *, sample: bool | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.names = names
        self.sample = sample
        self._here: object = None

    def again(self) -> OperatorLog:
        """An empty one of the same kind, for a replay."""
        return OperatorLog(self.names, sample=self.sample)

    def __enter__(self) -> OperatorLog:
        """Note this thread's own execution, and not those of replays inside it."""
        self._here = replaying.place()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and note it."""
        kwargs = kwargs or {}
        if replaying.place() != self._here or _is_noise(func, args):
            return func(*args, **kwargs)
        tags = getattr(func, "tags", ())
        noted = Operator(
            name=str(func),
            takes=_described([args, kwargs]),
            module=self.names.of(modules_here()),
            line=user_line(),
            random=torch.Tag.nondeterministic_seeded in tags,
            reads=torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
        )
        self.operators.append(noted)  # first: selective checkpointing may refuse it
        out = func(*args, **kwargs)
        noted.makes = _described(out) or "no tensor"
        if self.sample is not None and not noted.name.startswith(_UNSET):
            noted.values = tuple(_values(func, trees.tensors_in(out), sample=self.sample))
        return out


def first_difference(forward: OperatorLog, replay: OperatorLog) -> int | None:
    """The first operator that differs, in itself, its tensors, its module or its values; None if none does.

    A replay that is shorter has been stopped; where it goes on, that is a difference.
    """
    ours, theirs = forward.operators, replay.operators
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if not mine.looks_like(other) or mine.module != other.module or _differ(mine, other):
            return index
    return len(ours) if len(theirs) > len(ours) else None


def first_other_value(forward: OperatorLog, replay: OperatorLog) -> int | None:
    """The first operator that is another one, or that computed other bits, as far as both ran."""
    for index, (mine, other) in enumerate(zip(forward.operators, replay.operators, strict=False)):
        if not mine.looks_like(other) or _differ(mine, other):
            return index
    return None


def have_other_values(forward: OperatorLog, replay: OperatorLog, index: int) -> bool:
    """Whether it is in their values alone that two operators differ."""
    if index >= min(len(forward.operators), len(replay.operators)):
        return False
    mine, other = forward.operators[index], replay.operators[index]
    return mine.looks_like(other) and mine.module == other.module and _differ(mine, other)


def listing(title: str, log: OperatorLog) -> list[str]:
    """A line for each operator."""
    return [f"Operators of the {title}:", *(f"  {k}: {at(log, k)}" for k in range(len(log.operators)))]


def at(log: OperatorLog, index: int) -> str:
    """An operator and where it ran."""
    if index >= len(log.operators):
        return "nothing"
    operator = log.operators[index]
    return f"{operator} at {operator.place()}"


def _differ(mine: Operator, other: Operator) -> bool:
    pairs = zip(mine.values, other.values, strict=False)
    return any(a is not None and b is not None and a != b for a, b in pairs)


def _values(func: Any, made: Sequence[torch.Tensor], *, sample: bool) -> Iterator[int | None]:
    """Fingerprints; of a view, whose values are its base's, only where it begins."""
    schema = getattr(func, "_schema", None)
    is_view = schema is not None and not schema.is_mutable and any(each.alias_info for each in schema.returns)
    for tensor in made:
        yield (
            int(tensor.storage_offset())
            if is_view and tensor.layout is torch.strided
            else fingerprint(tensor, sample=sample)
        )


def _described(value: Any) -> str:
    return ", ".join(describe(look(tensor)) for tensor in trees.tensors_in(value))


def _is_noise(func: Any, args: Any) -> bool:
    if func is torch.ops.aten.detach.default:
        return True
    return (
        func is _CAST and bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_leaf and args[0].requires_grad
    )
