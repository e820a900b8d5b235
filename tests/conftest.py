"""What all tests share: the engine under test, the plain call as its oracle, threads, weak views of memory.

The oracle is plain autograd, never regrow against regrow: a program is a function of ``call``, and runs once with the
plain call and once with the checkpoint.
"""

from __future__ import annotations

import contextvars
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

import regrow

SEED = 20240501
JOIN_S = 60.0  # a thread that has not ended by then is in a deadlock

Call = Callable[..., Any]
Program = Callable[[Call], Any]


@dataclass(frozen=True)
class Engine:
    """One way to run a checkpointed call."""

    name: str
    use_reentrant: bool

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return regrow.checkpoint(*args, use_reentrant=self.use_reentrant, **kwargs)


ENGINES = [Engine("hooks", use_reentrant=False), Engine("reentrant", use_reentrant=True)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of what only one engine does run on that one; the mark says why. Those that fill the matrix are marked."""
    others = []
    for item in items:
        if "support" in getattr(item, "fixturenames", ()):
            item.add_marker("support")
        mark, spec = item.get_closest_marker("only"), getattr(item, "callspec", None)
        here = spec.params.get("engine") if spec is not None else None
        if mark is not None and here is not None and here.name not in mark.args:
            others.append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.name)
def engine(request: pytest.FixtureRequest) -> Engine:
    """The engine under test. What holds for one engine only is a test of its own."""
    return request.param


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call without a checkpoint: the oracle."""
    return function(*args, **kwargs)


def assert_same(got: Any, want: Any) -> None:
    """Equal bit for bit, in the same containers."""
    ours, our_tree = tree_flatten(got)
    theirs, their_tree = tree_flatten(want)
    assert our_tree == their_tree
    for mine, yours in zip(ours, theirs, strict=True):
        if isinstance(mine, torch.Tensor) and isinstance(yours, torch.Tensor):
            torch.testing.assert_close(mine, yours, rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == yours


@pytest.fixture
def same() -> Callable[[Any, Any], None]:
    """Assert that two nests of tensors are equal bit for bit."""
    return assert_same


@pytest.fixture
def same_grads(engine: Engine) -> Callable[..., Any]:
    """Run a program with the plain call and with the checkpoint; what it returns must be equal bit for bit.

    A program makes its own leaves, so that nothing is shared between the two runs; both start from the same seed.
    Further keywords are options of the checkpoint. Returns what the checkpointed run returned.
    """

    def compare(program: Program, **options: Any) -> Any:
        torch.manual_seed(SEED)
        want = program(plain)
        torch.manual_seed(SEED)
        got = program(partial(engine.checkpoint, **options))
        assert_same(got, want)
        return got

    return compare


class Counted:
    """A function that counts how often it is entered."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.function(*args, **kwargs)


@pytest.fixture
def counted() -> type[Counted]:
    """Make a function count its executions, forward and replays alike."""
    return Counted


class StorageTracker:
    """Notes storages weakly: ``tensor = track(tensor)``."""

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    @property
    def seen(self) -> int:
        return len(self._storages)

    @property
    def alive(self) -> int:
        return sum(not storage.expired() for storage in self._storages)


@pytest.fixture
def track() -> StorageTracker:
    """A tracker of storages: how many were noted, how many are alive."""
    return StorageTracker()


@pytest.fixture
def gc_off() -> Iterator[None]:
    """The cyclic collector is off: what is freed was freed by its last reference."""
    gc.collect()
    gc.freeze()  # what is alive by now is not looked at again, which makes the next collection quick
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, one seed, and the defaults of torch afterwards."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


def run_on_thread(work: Callable[[], Any]) -> Any:
    """Run work on a bare thread, with none of the caller's context variables; raise here what it raises there."""
    result: list[Any] = []
    error: list[BaseException] = []

    def body() -> None:
        try:
            result.append(contextvars.Context().run(work))
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(JOIN_S)
    assert not thread.is_alive(), "deadlock: the thread did not end"
    if error:
        raise error[0]
    return result[0]


class _Deeper(torch.autograd.Function):
    """A node whose backward starts another backward, until autograd moves on to a thread of its pool."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, visit: Callable[[], None]) -> torch.Tensor:
        ctx.visit = visit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.visit()
        return grad, None


def run_on_pool_thread(work: Callable[[], Any]) -> Any:
    """Run work on a thread of autograd's own pool: a backward nested deeper than 60 is moved there.

    Source: torch 2.13, autograd/engine.cpp, MAX_DEPTH.
    """
    starter = threading.get_ident()
    result: list[Any] = []

    def visit() -> None:
        if threading.get_ident() != starter:
            result.append(work())
            return
        with torch.enable_grad():
            _Deeper.apply(torch.ones((), requires_grad=True), visit).backward()

    visit()
    return result[0]


@pytest.fixture
def on_thread() -> Callable[[Callable[[], Any]], Any]:
    return run_on_thread


@pytest.fixture
def on_pool_thread() -> Callable[[Callable[[], Any]], Any]:
    return run_on_pool_thread


@pytest.fixture(params=[plain, run_on_thread, run_on_pool_thread], ids=["caller", "bare thread", "pool thread"])
def anywhere(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    """Run work on each kind of thread that backward can be on."""
    return request.param


@pytest.fixture(scope="session")
def fresh_process() -> Callable[[str], str]:
    """Run a program in a fresh interpreter that turns warnings into errors; return what it prints."""

    def run(program: str) -> str:
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Any]:
    """A gloo process group of one process: no network, no files."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def support() -> Iterator[Any]:
    """Report a cell of the support matrix, after the asserts that prove it: ``support(row, engine, cell)``."""
    from tests.support.page import WRITING, Support
    from tests.support.rows import ROWS

    reported = Support()
    yield reported
    if WRITING:
        reported.save(ROWS)
