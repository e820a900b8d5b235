"""What the tests of the tools share: nobody's sessions are left over from other tests, under names that are used here."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import regrow
from regrow._core import session


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No session is there when a test begins."""
    gc.collect()
    for name in list(session._sessions):
        regrow.clear_recompute_session(name)
    yield
