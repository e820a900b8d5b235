"""Selective checkpointing: a policy keeps the results of some operators, and replays read them. Knows no engine.

    forward   Keep    runs every operator, asks the policy, keeps or does not, in one list in order
    replay    Recall  walks the list: a kept result instead of the operator, the generator moved as in forward

Operators that return an alias or write into an argument always run again: they cost little or change state, and a
replay that skips them would read values nobody made. They are not in the list, nor are operators without tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from regrow._core import compat, devices, replaying
from regrow._core.faults import CheckpointError
from regrow._core.kept import Entry, Kept, leaves, map_leaves

_KEEP = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE})
_RUN = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})
# Autocast casts a parameter once and remembers it, so one of the two runs may lack the cast.
_CAST: Any = torch.ops.aten._to_copy.default

Policy = Callable[..., CheckpointPolicy | bool]


class FreshPolicy(ABC):
    """A policy that begins anew for every call, so that what it counts is of that call alone."""

    @abstractmethod
    def begin(self) -> Policy:
        """The policy function of one call."""


class Keep(TorchDispatchMode):
    """The mode of forward."""

    supports_higher_order_operators = True

    def __init__(self, policy: Policy, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy
        self._ask: Policy = policy.begin() if isinstance(policy, FreshPolicy) else policy
        self._kept = kept
        self._here: object = None

    def __enter__(self) -> Keep:
        """Start with forward; what replays inside it run is none of forward's."""
        self._here = replaying.place()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Forward has ended."""
        self._kept.complete = True
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; keep its result if the policy says so."""
        kwargs = kwargs or {}
        if replaying.place() != self._here:
            return func(*args, **kwargs)
        if runs_always(func):
            self._kept.protect(func, args, kwargs)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        entries = self._kept.entries
        if entries is None or not leaves(out):
            return out
        entry = Entry(func, _parameter(func, args))
        context = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        if keeps(self._ask(context, func, *args, **kwargs), func):
            entry.kept = map_leaves(out, self._kept.keep)
            entry.drawn = _generator_after(func, out, kwargs)
        entries.append(entry)
        return out


class Recall(TorchDispatchMode):
    """The mode of a replay: one walk over what forward kept. Enter it anew for every replay."""

    supports_higher_order_operators = True

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._entries: list[Entry] | None = None
        self._next = 0
        self._here: object = None

    def __enter__(self) -> Recall:
        """Start at forward's first operator; replays inside this one are not part of the walk."""
        self._here = replaying.place()
        self._entries = self._kept.entries
        self._next = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """The replay has ended; what is kept stays with the frame."""
        self._entries = None
        self._kept.end_replay()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Give what forward kept, or run the operator."""
        kwargs = kwargs or {}
        if replaying.place() != self._here:
            return func(*args, **kwargs)
        if runs_always(func):
            self._kept.protect(func, args, kwargs)
            return func(*args, **kwargs)
        entry = self._find(func, args) if self._entries is not None else None
        if entry is None or entry.kept is None or not all(kept.intact() for kept in leaves(entry.kept)):
            return func(*args, **kwargs)
        if entry.drawn is not None and self._kept.preserve_rng:
            devices.set_rng_state(*entry.drawn)
        return map_leaves(entry.kept, self._kept.serve)

    def _find(self, func: Any, args: Sequence[Any]) -> Entry | None:
        entries = self._entries or []
        parameter = _parameter(func, args)
        index = self._next
        while index < len(entries):
            entry = entries[index]
            if entry.func == func and _same_parameter(entry.parameter, parameter):
                self._next = index + 1
                return entry
            if entry.func != _CAST or entry.parameter is None:
                break
            index += 1  # forward cast a parameter that autocast still remembers here
        if parameter is not None:
            return None  # autocast remembered this cast in forward
        if tensorless(func) or not self._kept.complete:
            return None  # it is in no list, or forward has not come that far
        ran = str(entries[self._next].func) if self._next < len(entries) else "nothing"
        raise CheckpointError(
            f"{self._kept.label}: operator {self._next} of the replay is {func}, forward ran {ran} there. "
            "With selective checkpointing the function must run the same operators again: "
            "does it branch on state that changed since forward?",
            label=self._kept.label,
        )


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Policy | list[Any], allow_cache_entry_mutation: bool = False
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Two contexts that keep the results of some operators, for ``checkpoint(..., context_fn=...)``.

    The arguments are those of torch's function of the same name, the cache is regrow's own: second backwards, several
    passes and random operators are right.

    Args:
        policy_fn_or_list: ``policy_fn(ctx, op, *args, **kwargs)`` that returns a
            ``torch.utils.checkpoint.CheckpointPolicy`` or a bool (True keeps), or a list of operators to keep.
            It is asked in forward only, once per operator that returns new tensors; ``ctx.op_output`` is the result.
        allow_cache_entry_mutation: accepted for torch's signature and without effect: a kept value that is changed in
            place keeps what it was.

    Returns:
        The context of forward and the context of the replay. Make a new pair for every call.

    Raises:
        ValueError: an entry of the list is no ``OpOverload``, or the policy returned a value that cannot be honoured.
        TypeError: neither a function nor a list.

    Memory: kept results live until the graph of the call dies or its session is cleared. They pass through
        saved-tensor hooks that surround the call.

    Source: torch 2.13, utils/checkpoint.py, ``create_selective_checkpoint_contexts``.
    """
    policy = _policy_of(policy_fn_or_list)
    kept = Kept()
    return Keep(policy, kept), Recall(kept)


def _policy_of(policy_fn_or_list: Policy | list[Any]) -> Policy:
    if isinstance(policy_fn_or_list, list):
        return _ListPolicy(policy_fn_or_list)
    if not callable(policy_fn_or_list):
        raise TypeError(
            f"policy_fn_or_list must be a function or a list of operators, got {type(policy_fn_or_list).__name__}."
        )
    return policy_fn_or_list


def check_operators(name: str, operators: Sequence[Any]) -> None:
    """Refuse what is no operator."""
    for op in operators:
        if not isinstance(op, (compat.OpOverload, compat.HigherOrderOperator)):
            overload = f" Name an overload, such as {op}.default." if hasattr(op, "overloads") else ""
            raise ValueError(f"{name}: {op!r} is no OpOverload but {type(op).__name__}.{overload}")


class _ListPolicy:
    def __init__(self, operators: list[Any]) -> None:
        check_operators("policy_fn_or_list", operators)
        self._operators = frozenset(operators)

    def __call__(self, ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in self._operators else CheckpointPolicy.PREFER_RECOMPUTE


def keeps(answer: object, func: Any) -> bool:
    """Whether the answer of a policy is to keep; ValueError for one that cannot be honoured."""
    if isinstance(answer, bool):
        return answer
    if isinstance(answer, CheckpointPolicy) and answer in _KEEP | _RUN:
        return answer in _KEEP
    raise ValueError(
        f"policy_fn returned {answer!r} for {func}, which regrow cannot honour. Return a bool, or one of MUST_SAVE, "
        "PREFER_SAVE, MUST_RECOMPUTE, PREFER_RECOMPUTE; to keep values on the CPU, keep them under "
        "torch.autograd.graph.save_on_cpu()."
    )


@lru_cache(maxsize=4096)
def runs_always(func: Any) -> bool:
    """Whether an operator returns an alias or writes into an argument, and so is never kept."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    return bool(schema.is_mutable) or any(value.alias_info is not None for value in schema.returns)


@lru_cache(maxsize=4096)
def tensorless(func: Any) -> bool:
    """Whether an operator returns no tensor, and so is never kept."""
    schema = getattr(func, "_schema", None)
    return schema is not None and not any("Tensor" in str(value.type) for value in schema.returns)


def _parameter(func: Any, args: Sequence[Any]) -> ref[torch.Tensor] | None:
    if func is _CAST and args and isinstance(args[0], torch.Tensor) and args[0].is_leaf and args[0].requires_grad:
        return ref(args[0])
    return None


def _same_parameter(forward: ref[torch.Tensor] | None, replay: ref[torch.Tensor] | None) -> bool:
    if forward is None or replay is None:
        return forward is replay
    return forward() is replay()


def _generator_after(func: Any, out: Any, kwargs: dict[str, Any]) -> tuple[torch.device, torch.Tensor] | None:
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or kwargs.get("generator") is not None:
        return None
    device = leaves(out)[0].device
    state = devices.rng_state(device)
    return None if state is None else (device, state)
