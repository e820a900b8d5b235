"""Features of scheduling: handles, prefire, sessions, split backwards, scopes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from regrow import (
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
    reentrant_checkpoint_scope,
)
from tests.conftest import run_on_thread
from tests.support.calls import grads, leaf, mlp
from tests.support.matrix import Call, feature

SESSIONS = "Handles and sessions"
SPLIT = "Backward cut into dx and dw"
NAME = ("micro-batch", 0)


class Step:
    """Two calls of one network, their handles, and their loss; a session is opened around forward on request."""

    def __init__(self, call: Call, *, lazily: bool = False) -> None:
        self.nets, self.x = [mlp(), mlp()], leaf()
        with recompute_handle_collector_ctx() as self.handles:
            if lazily:
                with recompute_session_ctx(NAME, retain_on_unpack=True):
                    self.loss = self.forward(call)
            else:
                self.loss = self.forward(call)

    def forward(self, call: Call) -> torch.Tensor:
        first, second = self.nets
        return call(lambda t: second(t).cos(), call(lambda t: first(t).sin(), self.x)).square().sum()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for net in self.nets for parameter in net.parameters()]

    @property
    def grads(self) -> list[Any]:
        return grads(self.x, *self.nets)

    def prefire(self, **options: Any) -> None:
        for handle in self.handles:
            recompute_handle(handle, NAME, **options)

    def dx(self) -> None:
        with recompute_session_ctx(NAME, retain_on_unpack=True):
            (self.given,) = torch.autograd.grad(self.loss, self.x, retain_graph=True)
        assert all(parameter.grad is None for parameter in self.parameters)

    def dw(self) -> None:
        with recompute_session_ctx(NAME):
            self.loss.backward()
        clear_recompute_session(NAME)


@feature(SESSIONS, "prefired, then a whole backward", replays=2)
def prefired(call: Call) -> Any:
    step = Step(call)
    step.prefire()
    with recompute_session_ctx(NAME):
        step.loss.backward()
    clear_recompute_session(NAME)
    return step.grads


@feature(SESSIONS, "prefired in a carrier (`carrier=True`)", replays=2)
def carried(call: Call) -> Any:
    step = Step(call)
    step.prefire(carrier=True)
    with recompute_session_ctx(NAME):
        step.loss.backward()
    clear_recompute_session(NAME)
    return step.grads


@feature(SESSIONS, "prefired on another thread than forward and backward", replays=2)
def prefired_on_a_thread(call: Call) -> Any:
    step = Step(call)
    run_on_thread(step.prefire)
    with recompute_session_ctx(NAME):
        step.loss.backward()
    clear_recompute_session(NAME)
    return step.grads


@feature(SESSIONS, "two whole backwards in a session that retains", replays=2)
def two_backwards(call: Call) -> Any:
    step = Step(call)
    step.prefire()
    with recompute_session_ctx(NAME, retain_on_unpack=True):
        step.loss.backward(retain_graph=True)
    with recompute_session_ctx(NAME):
        step.loss.backward()
    clear_recompute_session(NAME)
    return step.grads


@feature(SESSIONS, "prefired, then a backward outside the session", replays=4)
def outside(call: Call) -> Any:
    step = Step(call)
    step.prefire()
    step.loss.backward()
    clear_recompute_session(NAME)
    return step.grads


@feature(SESSIONS, "prefired, cleared, then a backward", replays=4)
def cleared(call: Call) -> Any:
    step = Step(call)
    step.prefire()
    clear_recompute_session(NAME)
    step.loss.backward()
    return step.grads


@feature(SESSIONS, "prefired calls with checkpoints inside", replays=3)
def prefired_nest(call: Call) -> Any:
    net, x = mlp(), leaf()
    with recompute_handle_collector_ctx() as handles:
        loss = call(lambda t: call(lambda u: net(u).sin(), t.cos()).exp(), x).sum()
    for handle in handles:
        recompute_handle(handle, NAME)
    with recompute_session_ctx(NAME):
        loss.backward()
    clear_recompute_session(NAME)
    return grads(x, net)


@feature(SPLIT, "prefired: prefire, dx and dw in one session", replays=2)
def split_prefired(call: Call) -> Any:
    step = Step(call)
    step.prefire()
    step.dx()
    step.dw()
    return step.given, step.grads


@feature(SPLIT, "lazily: the session is opened around forward", replays=2)
def split_lazily(call: Call) -> Any:
    step = Step(call, lazily=True)
    step.dx()
    step.dw()
    return step.given, step.grads


@feature(SPLIT, "dw by `autograd.grad` for the parameters", replays=2)
def split_by_grad(call: Call) -> Any:
    step = Step(call)
    step.prefire()
    step.dx()
    with recompute_session_ctx(NAME):
        dw = torch.autograd.grad(step.loss, step.parameters)
    clear_recompute_session(NAME)
    return step.given, dw


@feature(
    SPLIT,
    "by torch's `stage_backward_input` and `stage_backward_weight` "
    "(with `use_reentrant=True` in a scope, triggers among the weights)",
    replays=2,
)
def split_by_torch(call: Call) -> Any:
    with reentrant_checkpoint_scope([]) as split:
        step = Step(call)
    weights = [*step.parameters, *(handle.backward_trigger for handle in split)]
    for handle in split:
        handle.set_phase("dx")
    step.prefire()
    with recompute_session_ctx(NAME, retain_on_unpack=True):
        (dx,), groups = stage_backward_input([step.loss], None, [step.x], iter(weights))
        assert all(parameter.grad is None for parameter in step.parameters)
        for handle in split:
            handle.set_phase("dw")
        stage_backward_weight(iter(weights), groups)
    clear_recompute_session(NAME)
    return dx, grads(*step.nets)


@feature(
    SPLIT,
    "by the phases of `reentrant_checkpoint_scope`",
    no_meaning={"hooks": "a scope is for `use_reentrant=True`; calls of this engine are split without one"},
)
def split_in_a_scope(call: Call) -> Any:
    net, x = mlp(), leaf()
    with reentrant_checkpoint_scope(net.parameters()) as handles:
        out = call(lambda t: net(t).sin(), x)
    gradient = torch.ones_like(out)
    for handle in handles:
        handle.set_phase("dx")
    dx = torch.autograd.grad(out, x, gradient, retain_graph=True)
    if call.plain:
        torch.autograd.backward(out, gradient, inputs=list(net.parameters()))
        return dx, grads(net)
    for handle in handles:
        handle.set_phase("dw")
    torch.autograd.grad(out, [handle.backward_trigger for handle in handles], gradient)
    return dx, grads(net)
