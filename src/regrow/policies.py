"""What selective checkpointing keeps, as values: named, printed, compared, combined. Must never hold state of a call.

    policies.keep_matmuls(every=2) | policies.keep_random()     a value: shared by calls, threads and pickles
        begin()                                                 one for each call: what counts, counts here

A policy is asked in forward only, once for each operator that returns new tensors. Replays read what was kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from regrow import arguments
from regrow._core import compat, families, selective
from regrow._core.families import operator_at, path_of

__all__ = ["Policy", "keep", "keep_attention", "keep_matmuls", "keep_random", "keep_where"]

Contexts: TypeAlias = "tuple[TorchDispatchMode, TorchDispatchMode]"
Recipe: TypeAlias = "tuple[type[Policy], tuple[Any, ...]]"  # a class and its arguments, policies as recipes again
Chooser: TypeAlias = "Callable[..., bool]"  # (ctx, op, *args, **kwargs)


@dataclass(frozen=True, repr=False)
class Policy(selective.FreshPolicy):
    """What to keep, as a frozen value: for ``regrow.checkpoint(..., policy_fn=policy)``.

    ``a | b`` keeps what either keeps, ``a & b`` what both keep, ``~a`` what ``a`` does not, ``a - b`` is ``a & ~b``. In
    a combination every part is asked about every operator, so a part counts the same alone and combined. What is kept
    is answered with ``MUST_SAVE``, the rest with ``PREFER_RECOMPUTE``.

    Memory: holds no tensor and no state of a call.

    Threads: a value may be used by any number of calls at once; what it counts is counted for each call.
    """

    @property
    def context_fn(self) -> Callable[[], Contexts]:
        """Makes a fresh pair of contexts each time it is called, for ``checkpoint(..., context_fn=policy.context_fn)``.

        While torch traces it is torch's own pair.
        """
        return partial(_contexts, self._recipe())

    @property
    @abstractmethod
    def counts(self) -> bool:
        """Whether an answer depends on those before it, so that every call needs a beginning."""

    @abstractmethod
    def _chooser(self) -> Chooser:
        """What decides during one call whether a result is kept."""

    def begin(self) -> Callable[..., CheckpointPolicy]:
        """A policy function for one call: give it to torch's ``create_selective_checkpoint_contexts``."""
        chosen = self._chooser()

        def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = chosen(ctx, op, *args, **kwargs)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return policy_fn

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Answer for one operator, where no call is known: refused if the policy counts."""
        if self.counts:
            raise ValueError(
                f"{self!r} counts the operators of one call, and was asked about {op} outside any. Give it to "
                "regrow.checkpoint as policy_fn=policy, to torch's checkpoint as context_fn=policy.context_fn, or ask "
                "what policy.begin() returns, once for each call."
            )
        return self.begin()(ctx, op, *args, **kwargs)

    def __or__(self, other: object) -> Policy:
        return _Either(self, other) if isinstance(other, Policy) else NotImplemented

    def __and__(self, other: object) -> Policy:
        return _Both(self, other) if isinstance(other, Policy) else NotImplemented

    def __sub__(self, other: object) -> Policy:
        return _Both(self, _Other(other)) if isinstance(other, Policy) else NotImplemented

    def __invert__(self) -> Policy:
        return _Other(self)

    @abstractmethod
    def _recipe(self) -> Recipe:
        """How to make an equal policy, in what torch.compile takes for constants."""


def keep(*operators: Any, every: int = 1) -> Policy:
    """Keep the results of these operators.

    Args:
        *operators: overloads such as ``torch.ops.aten.mm.default``, and higher order operators.
        every: of those that run in one call, the first is kept and then every ``every``-th: with 2, numbers 1, 3, 5.

    Returns:
        A policy. Order and repetition of the operators do not matter.

    Raises:
        ValueError: no operator, something else than an operator, an operator whose result cannot be kept because it
            returns an alias or no tensor or writes into an argument, or ``every`` that is no whole number from 1.
    """
    if not operators:
        raise ValueError("operators: keep() needs at least one, such as torch.ops.aten.mm.default; got none.")
    selective.check_operators("operators", operators)
    if not compat.tracing() and (refused := [op for op in operators if _never_kept(op)]):
        raise ValueError(
            f"operators: {', '.join(map(str, refused))} cannot be kept: an operator that returns an alias or no "
            "tensor, or writes into an argument, always runs again. Name operators that return new tensors."
        )
    return _Operators(frozenset(operators), _checked(every))


def keep_matmuls(*, every: int = 1) -> Policy:
    """Keep the results of matrix products: mm, bmm, addmm, baddbmm, mv, linear, scaled and grouped ones.

    Args:
        every: of those that run in one call, the first is kept and then every ``every``-th: with 2, numbers 1, 3, 5.

    Returns:
        A policy.

    Raises:
        ValueError: ``every`` is no whole number from 1.
    """
    return _Family(_Kind.MATMULS, _checked(every))


def keep_attention() -> Policy:
    """Keep the results of attention: what ``scaled_dot_product_attention`` runs on any device, and flex_attention.

    Where torch takes the path that is written out in matrix products, a softmax and a dropout, there is no operator of
    attention, and this keeps nothing: see `keep_matmuls`.

    Returns:
        A policy.
    """
    return _Family(_Kind.ATTENTION, 1)


def keep_random() -> Policy:
    """Keep what operators draw at random: what torch tags ``nondeterministic_seeded``, attention if it has dropout.

    Draws that write into a tensor, such as ``bernoulli_``, which is dropout on the CPU, always run again and draw
    forward's numbers, because a replay begins with forward's generators unless ``preserve_rng_state=False``.

    Returns:
        A policy.
    """
    return _Family(_Kind.RANDOM, 1)


def keep_where(policy_fn: Callable[..., Any]) -> Policy:
    """Keep what a function of yours keeps, to combine it with the other policies.

    Args:
        policy_fn: ``policy_fn(ctx, op, *args, **kwargs)`` that returns a bool or a
            ``torch.utils.checkpoint.CheckpointPolicy``. State of its own is shared by all calls.

    Returns:
        A policy, equal to another if the functions are, and pickled as the function is.

    Raises:
        ValueError: ``policy_fn`` cannot be called, or, from the call, it returned a value that cannot be honoured.
    """
    arguments.check_callable("policy_fn", policy_fn, "a function policy_fn(ctx, op, *args, **kwargs)")
    return _Asked(policy_fn)


class _Kind(Enum):
    MATMULS = "keep_matmuls"
    ATTENTION = "keep_attention"
    RANDOM = "keep_random"


@dataclass(frozen=True, repr=False)
class _Operators(Policy):
    operators: frozenset[Any]
    every: int

    @property
    def counts(self) -> bool:
        return self.every > 1

    def _chooser(self) -> Chooser:
        operators = self.operators
        return _every(self.every, lambda ctx, op, *args, **kwargs: op in operators)

    def __repr__(self) -> str:
        return f"keep({', '.join([*sorted(map(path_of, self.operators)), *_said(self.every)])})"

    def __reduce__(self) -> Any:
        return _found, (sorted(map(path_of, self.operators)), self.every)  # operators themselves cannot be pickled

    def _recipe(self) -> Recipe:
        return _Operators, (self.operators, self.every)


@dataclass(frozen=True, repr=False)
class _Family(Policy):
    kind: _Kind
    every: int

    @property
    def counts(self) -> bool:
        return self.every > 1

    def _chooser(self) -> Chooser:
        return _every(self.every, _MEMBERS[self.kind])

    def __repr__(self) -> str:
        return f"{self.kind.value}({', '.join(_said(self.every))})"

    def _recipe(self) -> Recipe:
        return _Family, (self.kind, self.every)


@dataclass(frozen=True, repr=False)
class _Asked(Policy):
    policy_fn: Callable[..., Any]

    @property
    def counts(self) -> bool:
        return False

    def _chooser(self) -> Chooser:
        asked = self.policy_fn
        return lambda ctx, op, *args, **kwargs: selective.keeps(asked(ctx, op, *args, **kwargs), op)

    def __repr__(self) -> str:
        return f"keep_where({getattr(self.policy_fn, '__qualname__', repr(self.policy_fn))})"

    def _recipe(self) -> Recipe:
        return _Asked, (self.policy_fn,)


@dataclass(frozen=True, repr=False)
class _Either(Policy):
    first: Policy
    second: Policy

    @property
    def counts(self) -> bool:
        return self.first.counts or self.second.counts

    def _chooser(self) -> Chooser:
        first, second = self.first._chooser(), self.second._chooser()
        # No short cut: a part that counts must see every operator.
        return lambda *call, **kwargs: first(*call, **kwargs) | second(*call, **kwargs)

    def __repr__(self) -> str:
        return f"{self.first!r} | {_inner(self.second, _Either)}"

    def _recipe(self) -> Recipe:
        return _Either, (self.first._recipe(), self.second._recipe())


@dataclass(frozen=True, repr=False)
class _Both(Policy):
    first: Policy
    second: Policy

    @property
    def counts(self) -> bool:
        return self.first.counts or self.second.counts

    def _chooser(self) -> Chooser:
        first, second = self.first._chooser(), self.second._chooser()
        return lambda *call, **kwargs: first(*call, **kwargs) & second(*call, **kwargs)

    def __repr__(self) -> str:
        return f"{_inner(self.first, _Either)} & {_inner(self.second, _Either, _Both)}"

    def _recipe(self) -> Recipe:
        return _Both, (self.first._recipe(), self.second._recipe())


@dataclass(frozen=True, repr=False)
class _Other(Policy):
    policy: Policy

    @property
    def counts(self) -> bool:
        return self.policy.counts

    def _chooser(self) -> Chooser:
        kept = self.policy._chooser()
        return lambda *call, **kwargs: not kept(*call, **kwargs)

    def __repr__(self) -> str:
        return f"~{_inner(self.policy, _Either, _Both)}"

    def _recipe(self) -> Recipe:
        return _Other, (self.policy._recipe(),)


def _inner(policy: Policy, *looser: type[Policy]) -> str:
    return f"({policy!r})" if isinstance(policy, looser) else repr(policy)


def _made(recipe: Recipe) -> Policy:
    kind, parts = recipe
    return kind(*(_made(part) if _is_recipe(part) else part for part in parts))


def _is_recipe(part: Any) -> bool:
    return isinstance(part, tuple) and isinstance(part[0], type) and issubclass(part[0], Policy)


def _contexts(recipe: Recipe) -> Contexts:
    policy = _made(recipe)
    if compat.tracing():
        contexts: Contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts(policy.begin())
        return contexts
    return selective.create_selective_checkpoint_contexts(policy)


def _checked(every: Any) -> int:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(
            f"every must be a whole number, 1 or more, got {every!r} of type {type(every).__name__}: of the operators "
            "in one call the first is kept, and then every such number."
        )
    return every


def _said(every: int) -> list[str]:
    return [] if every == 1 else [f"every={every}"]


def _every(every: int, matches: Chooser) -> Chooser:
    if every == 1:
        return matches
    seen = count()
    return lambda *call, **kwargs: matches(*call, **kwargs) and next(seen) % every == 0


def _never_kept(op: Any) -> bool:
    return selective.runs_always(op) or selective.tensorless(op)


def _found(paths: list[str], every: int) -> Policy:
    return keep(*map(operator_at, paths), every=every)


_MEMBERS: dict[_Kind, Chooser] = {
    _Kind.MATMULS: lambda ctx, op, *args, **kwargs: families.is_matmul(op),
    _Kind.ATTENTION: lambda ctx, op, *args, **kwargs: families.is_attention(op),
    _Kind.RANDOM: lambda ctx, op, *args, **kwargs: families.is_random(op, args, kwargs),
}
