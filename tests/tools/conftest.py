"""What the tests of the tools share: no session is left over from other tests, under a name that is used here."""

from __future__ import annotations

import pytest

import regrow
from regrow._core import session


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No session is there when a test begins, though a graph that another test left may know one."""
    for name in list(session._sessions):
        regrow.clear_recompute_session(name)
    session._sessions.clear()
