"""What the tests of state share: a program runs once plainly, and once in each way that a replay can come about.

A program is a function of ``run``: ``run(function, *args)`` makes the call, ``run.backward(loss)`` runs backward on the
thread under test. What the program returns must be equal bit for bit, so it returns gradients and the state afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import regrow
from regrow import clear_recompute_session, recompute_handle, recompute_handle_collector_ctx, recompute_session_ctx
from tests.conftest import SEED, Engine, assert_same, plain, run_on_pool_thread, run_on_thread

SESSION = "state"
Where = Callable[[Callable[[], Any]], Any]


class PlannedError(Exception):
    """A replay that fails on purpose."""


class Run:
    """The plain call: the oracle. Its backward runs on the thread under test."""

    def __init__(self, engine: Engine, where: Where, options: dict[str, Any]) -> None:
        self.checkpoint = engine.checkpoint
        self.reentrant = engine.use_reentrant
        self.where = where
        self.options = options

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, and see that the thread it ran on is as it was."""

        def watched() -> None:
            before = surroundings()
            self.sweep(loss)
            assert surroundings() == before

        self.where(watched)

    def sweep(self, loss: torch.Tensor) -> None:
        loss.backward()


class Checkpointed(Run):
    """Backward asks for the replay."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(function, *args, **self.options, **kwargs)


class ToTheEnd(Run):
    """Every replay runs the function to its end."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(function, *args, **{**self.options, "early_stop": False}, **kwargs)


class FailsFirst(ToTheEnd):
    """The first replay fails when the function is done, the second succeeds."""

    fails = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def failing(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            if regrow.is_recomputing() and self.fails:
                self.fails -= 1
                raise PlannedError
            return out

        with self.forgiving():
            return super().__call__(failing, *args, **kwargs)

    def sweep(self, loss: torch.Tensor) -> None:
        self.fails = 1
        with self.forgiving(), pytest.raises(PlannedError):
            loss.backward(retain_graph=True)
        loss.backward()

    def forgiving(self) -> AbstractContextManager[None]:
        """A failed backward releases a reentrant call, unless a session retains it."""
        return recompute_session_ctx(SESSION, retain_on_unpack=True) if self.reentrant else nullcontext()


class Nested(Run):
    """A checkpoint in a checkpoint; the outer one is on hooks, as reentrant ones do not nest."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def outer(*args: Any, **kwargs: Any) -> Any:
            return self.checkpoint(function, *args, **self.options, **kwargs)

        return regrow.checkpoint(outer, *args, **self.options, **kwargs)


class Lazy(Run):
    """Backward asks for the replay, in a session that keeps it."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with recompute_session_ctx(SESSION):
            return self.checkpoint(function, *args, **self.options, **kwargs)

    def sweep(self, loss: torch.Tensor) -> None:
        with recompute_session_ctx(SESSION, retain_on_unpack=True):
            loss.backward()
        clear_recompute_session(SESSION)


class Prefired(Run):
    """Everything is replayed before backward begins, last call first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.handles: list[Any] = []

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with recompute_handle_collector_ctx() as handles:
            out = self.checkpoint(function, *args, **self.options, **kwargs)
        self.handles += handles
        return out

    def sweep(self, loss: torch.Tensor) -> None:
        while self.handles:
            recompute_handle(self.handles.pop(), SESSION)
        with recompute_session_ctx(SESSION):
            loss.backward()
        clear_recompute_session(SESSION)


# Every way on a foreign thread or on both; a thread of the pool costs sixty backwards to come by.
PAIRS: dict[str, tuple[type[Run], Where]] = {
    "caller": (Checkpointed, plain),
    "bare thread": (Checkpointed, run_on_thread),
    "pool thread": (Checkpointed, run_on_pool_thread),
    "to the end": (ToTheEnd, plain),
    "fails first": (FailsFirst, plain),
    "fails first, bare thread": (FailsFirst, run_on_thread),
    "nested, bare thread": (Nested, run_on_thread),
    "lazy session, bare thread": (Lazy, run_on_thread),
    "prefired": (Prefired, plain),
    "prefired, bare thread": (Prefired, run_on_thread),
}


def surroundings() -> tuple[Any, ...]:
    """What a replay changes on its thread and in the process, and must put back."""
    return (
        torch.random.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch._C._len_torch_function_stack(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
    )


@pytest.fixture(params=PAIRS.values(), ids=PAIRS)
def same_in_any_way(engine: Engine, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run a program plainly and in one way on one kind of thread; what it returns is equal bit for bit."""
    way, where = request.param

    def compare(program: Callable[[Run], Any], **options: Any) -> Any:
        torch.manual_seed(SEED)
        want = program(Run(engine, where, options))
        torch.manual_seed(SEED)
        got = program(way(engine, where, options))
        assert_same(got, want)
        return got

    return compare


@pytest.fixture(autouse=True)
def flags_as_they_were() -> Iterator[None]:
    """The flags of the process are as before the test."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    precision = torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_float32_matmul_precision(precision)
