"""Events: few, of plain values, and nothing at all where nobody listens."""

from __future__ import annotations

import logging
import sys
from collections import Counter

import pytest
import torch

import regrow
from regrow._core import events, telling


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(50):
        x = x.sin()
    return x


@pytest.fixture
def heard():
    """Every event, in order."""
    found: list[events.Event] = []
    events.listen(found.append)
    yield found
    events.leave(found.append)
    assert events.listeners == ()


def plain_backward(x, call):
    call(chain, x).sum().backward()


def repeated_backward(x, call):
    loss = call(chain, x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def in_a_session(x, call):
    with regrow.recompute_handle_collector_ctx() as handles:
        loss = call(chain, x).sum()
    regrow.recompute_handle(handles[0], "s")
    for retain in (True, False):
        with regrow.recompute_session_ctx("s", retain_on_unpack=retain):
            torch.autograd.grad(loss, x, retain_graph=True)
    regrow.clear_recompute_session("s")


def let_go_in_between(x, call):
    with regrow.recompute_session_ctx("s", retain_on_unpack=True):
        loss = call(chain, x).sum()
        for _ in range(2):
            torch.autograd.grad(loss, x, retain_graph=True)
            regrow.clear_recompute_session("s")


PROGRAMS = [plain_backward, repeated_backward, in_a_session, let_go_in_between]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_call_has_at_most_six_events_however_many_tensors_it_saves(engine, heard, program):
    """Rule 32: none for a tensor that is saved or read."""
    program(torch.randn(3, requires_grad=True), engine.checkpoint)
    per_call = Counter(event.call for event in heard if hasattr(event, "call"))
    assert len(per_call) == 1
    assert max(per_call.values()) <= 6


@pytest.mark.only("hooks", because="a reentrant call lets go in dw")
def test_the_life_of_a_call_is_told_in_order(engine, heard):
    """Rule 32: forward, prefire, its end, and the death of the graph."""
    in_a_session(torch.randn(3, requires_grad=True), engine.checkpoint)
    told = [type(event).__name__ for event in heard]
    assert told == [
        *("Forward", "SessionOpened", "Replayed", "SessionCleared", "Released"),
        *told[5:],
    ]
    assert sorted(told[5:]) == ["Died", "SessionDropped"]
    (released,) = [event for event in heard if isinstance(event, events.Released)]
    assert (released.reason, released.passes, released.prefired) == ("cleared", 2, True)


def test_a_line_of_the_user_opens_a_session(engine, heard):
    """Rule 32: where it was opened, not where regrow noted it."""
    in_a_session(torch.randn(3, requires_grad=True), engine.checkpoint)
    (opened,) = [event for event in heard if isinstance(event, events.SessionOpened)]
    assert "test_tool_events.py:" in opened.where
    assert opened.where.endswith("in in_a_session")


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_told_where_nobody_listens(engine, program):
    """Rule 32: not one function of it runs."""
    called = []

    def watch(frame, event, arg):
        if event == "call" and frame.f_globals.get("__name__") in (events.__name__, telling.__name__):
            called.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        program(torch.randn(3, requires_grad=True), engine.checkpoint)
    finally:
        sys.setprofile(None)
    assert called == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_whoever_listens_changes_no_gradient_and_no_number_of_runs(engine, heard, program):
    """Rule 32: the oracle is the same program with nobody listening."""

    def run(listening: bool) -> tuple[int, torch.Tensor]:
        runs = []
        x = torch.linspace(0, 1, 3).requires_grad_()

        def call(function, *args):
            return engine.checkpoint(lambda t: runs.append(1) or function(t), *args)

        if not listening:
            events.leave(heard.append)
        program(x, call)
        return len(runs), x.grad

    with_listener = run(True)
    without = run(False)
    assert with_listener[0] == without[0]
    torch.testing.assert_close(with_listener[1], without[1], rtol=0, atol=0)


def test_listeners_keep_nothing_alive(engine, heard, track, gc_off):
    """Rule 32: events are numbers and words; what they tell of dies as if nobody heard."""
    x = torch.randn(3, requires_grad=True)
    with regrow.recompute_handle_collector_ctx() as handles:
        loss = engine.checkpoint(lambda t: track(track(t.sin()).exp()).cos(), x).sum()
    regrow.recompute_handle(handles[0], "s")
    assert track.alive == 1
    del loss
    assert track.alive == 0
    assert telling._alive == {}
    assert telling._held == {}
    assert telling._sessions == {}
    assert all(isinstance(field, (int, str, bool, tuple, type(None))) for event in heard for field in event)


def test_a_listener_that_raises_ends_nothing(engine, heard, caplog):
    """Rule 32: it is logged, the others hear, the training goes on."""

    def broken(event: events.Event) -> None:
        raise ZeroDivisionError("in a listener")

    x = torch.randn(3, requires_grad=True)
    events.listen(broken)
    with caplog.at_level(logging.ERROR, "regrow.trace"):
        plain_backward(x, engine.checkpoint)
    events.leave(broken)
    assert x.grad is not None
    assert "in a listener" in caplog.text
    assert [type(event).__name__ for event in heard] == ["Forward", "Replayed", "Released", "Died"]


@pytest.mark.only("hooks", because="a reentrant call is one node that is always replayed")
def test_a_call_whose_backward_needs_nothing_is_not_told_of(engine, heard):
    """Rule 2: it leaves no frame."""
    engine.checkpoint(lambda t: t + 1, torch.randn(3, requires_grad=True)).sum().backward()
    with torch.no_grad():
        engine.checkpoint(chain, torch.randn(3))
    assert heard == []
