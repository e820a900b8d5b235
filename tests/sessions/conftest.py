"""What the tests of sessions share: a function that counts its runs, threads, a collector at rest."""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.conftest import Engine
from tests.sessions import calls

JOIN_S = 30.0  # a thread that has not ended by then is in a deadlock


class Block:
    """Two layers on double matrices that count their runs and remember, weakly, what each run made.

    Backward needs what the hooks save: the input, both weights, and the three activations in ``made``.

    Attributes:
        runs: how often the function was entered.
        timeline: "forward" for the first run, "replay" for every later one; shared between blocks on request.
        halfway: called in the middle of every run, with the number of runs so far.
    """

    held_when_filled = 3 * 4 * 4 * 8  # bytes of the three activations

    def __init__(self, timeline: list[str] | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inner = torch.rand(4, 4, generator=generator, dtype=torch.float64).requires_grad_()
        self.outer = torch.rand(4, 4, generator=generator, dtype=torch.float64).requires_grad_()
        self.runs = 0
        self.timeline = [] if timeline is None else timeline
        self.halfway: Callable[[int], None] = lambda runs: None
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __call__(self, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        inner, outer = weights or self.weights
        self.runs += 1
        self.timeline.append("forward" if self.runs == 1 else "replay")
        mixed = self.remember(x @ inner)
        wave = self.remember(mixed.sin())
        self.halfway(self.runs)
        return self.remember(wave @ outer).cos()

    @property
    def weights(self) -> list[torch.Tensor]:
        return [self.inner, self.outer]

    @property
    def replays(self) -> int:
        return self.runs - 1

    @property
    def held_bytes(self) -> int:
        """Bytes of the activations that are alive, whichever run made them; shared storages count once."""
        return sum({storage.cdata: size for storage, size in self._made if not storage.expired()}.values())

    def gradients(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The oracle: plain autograd, for x and both weights; not counted as runs."""
        loss = ((x @ self.inner).sin() @ self.outer).cos().sum()
        return list(torch.autograd.grad(loss, [x, *self.weights]))

    def remember(self, tensor: torch.Tensor) -> torch.Tensor:
        """Watch a tensor's storage without keeping it."""
        storage = tensor.untyped_storage()
        self._made.append((StorageWeakRef(storage), storage.nbytes()))
        return tensor


@pytest.fixture
def on_each_engine(engine: Engine) -> Iterator[None]:
    """Calls are those of the engine under test."""
    calls.chosen["use_reentrant"] = engine.use_reentrant
    yield
    calls.chosen["use_reentrant"] = False


@pytest.fixture
def make_block() -> type[Block]:
    return Block


@pytest.fixture
def block() -> Block:
    return Block()


@pytest.fixture
def x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.rand(4, 4, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.fixture
def equal() -> Callable[[Any, Any], bool]:
    """Whether two lists of tensors are equal bit for bit."""
    return lambda ours, theirs: len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The garbage collector is off: what is freed was freed by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Started:
    """Work on a bare thread: none of the caller's context variables, none of its thread locals."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def result(self) -> Any:
        """What the work returned; its exception is raised here."""
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "deadlock: the thread did not end"
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._result = contextvars.Context().run(work)
        except BaseException as error:
            self._error = error


@pytest.fixture
def start() -> type[Started]:
    """Start work on a bare thread."""
    return Started


class _Visit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, visit: Callable[[], None]) -> torch.Tensor:
        ctx.visit = visit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.visit()
        return grad, None


def on_bare_thread(work: Callable[[], Any]) -> Any:
    """Run work on a bare thread and wait for it."""
    return Started(work).result()


def nested_until(reached: Callable[[int], bool], work: Callable[[], Any]) -> Any:
    """Run work inside backwards that are nested until ``reached(depth)``."""
    results = []

    def visit(depth: int) -> None:
        if reached(depth):
            results.append(work())
            return
        with torch.enable_grad():
            _Visit.apply(torch.ones((), requires_grad=True), lambda: visit(depth + 1)).backward()

    visit(0)
    return results[0]


def on_engine_thread(work: Callable[[], Any]) -> Any:
    """Run work on a thread of autograd's own pool: a backward nested deep enough is moved there."""
    starter = threading.get_ident()
    return nested_until(lambda depth: threading.get_ident() != starter, work)


@pytest.fixture
def at_depth() -> Callable[[int, Callable[[], Any]], Any]:
    """Run work inside a number of nested backwards."""
    return lambda depth, work: nested_until(lambda reached: reached == depth, work)


@pytest.fixture(params=["caller", "bare thread", "engine thread"])
def anywhere(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    """Run work on each kind of thread that backward can be on."""
    return {"caller": lambda work: work(), "bare thread": on_bare_thread, "engine thread": on_engine_thread}[
        request.param
    ]


@pytest.fixture
def wait() -> Callable[[threading.Event], None]:
    """Wait for an event; a deadlock fails."""

    def wait_for(event: threading.Event) -> None:
        assert event.wait(JOIN_S), "deadlock: the event was not set"

    return wait_for
