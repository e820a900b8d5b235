"""Random sequences of the scheduling verbs against a model of the rules: gradients, refusals, replays, bytes held."""

from __future__ import annotations

import contextvars
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from regrow import (
    FrameBusyError,
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from tests.sessions.calls import checkpoint

pytestmark = pytest.mark.usefixtures("on_each_engine")

IDS = st.sampled_from(["a", "b"])
TARGETS = st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=3, unique=True)
"""Which of the input and the two weights a pass asks for."""


def on_bare_thread(work):
    """Run work where no context variable of ours is seen."""
    results, errors = [], []

    def run():
        try:
            results.append(contextvars.Context().run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()  # kept here, it would keep itself alive by its traceback
    return results[0]


@dataclass
class Call:
    """One checkpointed call and what the rules say about it.

    Attributes:
        bound: the id of its session.
        held: "nothing", "all" or "part" of its values are held by the session.
    """

    block: object
    x: torch.Tensor
    output: torch.Tensor | None
    handle: object
    bound: str | None
    held: str = "nothing"
    expected: list[torch.Tensor] = field(default_factory=list)

    def targets(self, picked):
        every = [self.x, *self.block.weights]
        return [every[index] for index in picked]


class Scheduler(RuleBasedStateMachine):
    """The verbs, in any order. What the model expects is written where the verb is called."""

    calls = Bundle("calls")
    make_block: type

    def __init__(self):
        super().__init__()
        self.contexts = []
        self.live = []
        self.seed = 0

    @property
    def current(self):
        """Id and retain_on_unpack of the innermost open context."""
        return (self.contexts[-1][1], self.contexts[-1][2]) if self.contexts else (None, None)

    @rule(target=calls)
    def forward(self):
        self.seed += 1
        block = self.make_block(seed=self.seed)
        x = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(self.seed)).requires_grad_()
        with recompute_handle_collector_ctx() as handles:
            output = checkpoint(block, x)
        call = Call(block, x, output, handles[0], self.current[0], expected=block.gradients(x))
        self.live.append(call)
        return call

    @rule(session_id=IDS, retain=st.booleans())
    def open_context(self, session_id, retain):
        context = recompute_session_ctx(session_id, retain_on_unpack=retain)
        if self.current[0] not in (None, session_id):
            with pytest.raises(ValueError, match="session_id"):
                context.__enter__()
            return
        context.__enter__()
        self.contexts.append((context, session_id, retain))

    @precondition(lambda self: self.contexts)
    @rule()
    def close_context(self):
        self.contexts.pop()[0].__exit__(None, None, None)

    @rule(call=calls, session_id=IDS, fails=st.booleans())
    def prefire(self, call, session_id, fails):
        runs = call.block.runs
        current, retain = self.current
        if call.output is None:
            self.refused(RuntimeError, call, session_id)
        elif current not in (None, session_id) or retain is False:
            self.refused(ValueError, call, session_id)
        elif call.bound not in (None, session_id):
            self.refused(FrameBusyError, call, session_id)
        elif call.held != "nothing":
            recompute_handle(call.handle, session_id)
            assert call.block.runs == runs
        elif fails:
            with failing(call):
                recompute_handle(call.handle, session_id)
        else:
            recompute_handle(call.handle, session_id)
            assert call.block.runs == runs + 1
            call.bound, call.held = session_id, "all"

    def refused(self, error, call, session_id):
        runs = call.block.runs
        with pytest.raises(error):
            recompute_handle(call.handle, session_id)
        assert call.block.runs == runs

    @rule(call=calls, picked=TARGETS, elsewhere=st.booleans(), fails=st.booleans())
    def backward(self, call, picked, elsewhere, fails):
        if call.output is None:
            return
        runs = call.block.runs
        loss = call.output.sum()
        current, retain = self.current

        def work():
            return torch.autograd.grad(loss, call.targets(picked), retain_graph=True)

        in_session = current is not None and call.bound == current
        if current is not None and call.bound not in (None, current) and not elsewhere:
            with pytest.raises(FrameBusyError):
                work()
            assert call.block.runs == runs
            return
        replays = not in_session or call.held == "nothing"
        if fails and replays:
            with failing(call):
                on_bare_thread(work) if elsewhere else work()
            return
        grads = on_bare_thread(work) if elsewhere else work()
        assert all(torch.equal(grad, call.expected[index]) for grad, index in zip(grads, picked, strict=True))
        if not in_session:
            assert call.block.runs == runs + 1
            return
        most = {"nothing": 1, "all": 0, "part": 1}[call.held]
        assert call.block.runs <= runs + most
        if call.held == "nothing":
            assert call.block.runs == runs + 1
        if not retain:
            call.held = "part"
        elif call.held == "nothing":
            call.held = "all"

    @rule(session_id=IDS)
    def clear(self, session_id):
        clear_recompute_session(session_id)
        for call in self.live:
            if call.bound == session_id:
                call.bound, call.held = None, "nothing"

    @rule(call=consumes(calls))
    def drop(self, call):
        call.output = None
        call.held = "nothing"

    @invariant()
    def bytes_held_are_those_of_the_rules(self):
        for call in self.live:
            most = call.block.held_when_filled
            low, high = {"nothing": (0, 0), "all": (most, most), "part": (0, most)}[call.held]
            assert low <= call.block.held_bytes <= high

    def teardown(self):
        while self.contexts:
            self.contexts.pop()[0].__exit__(None, None, None)
        for session_id in ("a", "b"):
            clear_recompute_session(session_id)


@contextmanager
def failing(call):
    """The next run of a call's block raises half-way, and the error reaches the caller."""

    def fail(runs):
        raise ZeroDivisionError

    call.block.halfway = fail
    raised = False
    try:
        yield
    except ZeroDivisionError:
        raised = True
    call.block.halfway = lambda runs: None
    assert raised


@pytest.mark.only("hooks", because="a session holds the graph of a reentrant replay as a whole")
def test_any_sequence_of_verbs_keeps_the_rules(make_block):
    """Rules 1, 6, 8 to 12: gradients are plain, refusals change nothing, replays and bytes are what the rules allow."""
    machine = type("Machine", (Scheduler,), {"make_block": make_block})
    machine.TestCase.settings = settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=60,
        stateful_step_count=40,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase("runTest").runTest()
