"""Fixtures of the platform tests. Must import no framework: one of the two is absent in each environment.

In an environment with MindSpore this directory is the whole test run (``--confcutdir``), without the fixtures above it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.platforms.adapters import ADAPTERS, Adapter, Block, installed

# Each framework that is installed. One that REGROW_PLATFORM names must be: a run for it cannot pass by skipping.
HERE = [name for name in ADAPTERS if installed(name) or os.environ.get("REGROW_PLATFORM") == name]


@pytest.fixture(params=HERE, scope="session")
def adapter(request: pytest.FixtureRequest) -> Adapter:
    """A framework."""
    made: Adapter = ADAPTERS[request.param]()
    return made


@pytest.fixture
def on(adapter: Adapter) -> Iterator[Adapter]:
    """The framework under test, recording."""
    adapter.seed(20240501)
    with adapter.recording():
        yield adapter


@pytest.fixture
def make_block(on: Adapter) -> Callable[..., Block]:
    return lambda seed=0: Block(on, seed)


@pytest.fixture
def block(make_block: Callable[..., Block]) -> Block:
    return make_block()


@pytest.fixture
def x(on: Adapter) -> Any:
    return on.tensor(np.random.RandomState(11).rand(4, 4).astype(np.float32))


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    """Whether two lists of arrays are equal bit for bit."""
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


@pytest.fixture
def equal() -> Callable[[list[np.ndarray], list[np.ndarray]], bool]:
    return same


@pytest.fixture(scope="session")
def in_a_process() -> Callable[..., str]:
    """Run a program in a fresh interpreter; return what it prints."""

    def run(program: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
