"""Ten seeded faults: what makes a replay differ, and a report that names the operator, its module and its line."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import regrow
from regrow import CheckpointError, InputChangedError, ReplayMismatchError, is_recomputing

SCALE = 2.0


class Part(nn.Module):
    """A layer of a model, with a fault in it that shows in the replay."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.step = 0
        self.flag = True


class FlippedBranch(Part):
    def forward(self, x):
        y = self.lin(x).sin()
        if self.flag:
            return y.exp().cos()
        return y.tanh().cos()


class ChangedGlobal(Part):
    def forward(self, x):
        y = self.lin(x).sin()
        return (y * SCALE).cos()


class MissingAutocast(Part):
    def forward(self, x):
        with torch.autocast("cpu", enabled=not is_recomputing()):
            return self.lin(x.sin()).float().cos()


class Router(Part):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.noise = 0.0

    def forward(self, x):
        scores = torch.stack([x.sum(), x.sum() + 1 - self.noise])
        expert = self.experts[int(scores.argmax())]
        return expert(x.sin()).cos()


class ReadsInput(Part):
    def forward(self, x, mask):
        y = self.lin(x)
        return (y * mask).sin().cos()


class OtherDevice(Part):
    def forward(self, x):
        y = self.lin(x).sin()
        if is_recomputing():
            y = y.to("meta")
        return y.exp().cos()


class CountedShape(Part):
    def forward(self, x):
        self.step += 1
        y = self.lin(x).sin()
        return y[: self.step].exp().cos()


class LostGenerator(Part):
    def forward(self, x):
        y = self.lin(x).sin()
        return torch.dropout(y, 0.5, True).cos()


class DroppedOperator(Part):
    def forward(self, x):
        y = self.lin(x).sin()
        if not is_recomputing():
            y = y.relu()
        return y.exp().cos()


class SwappedOperators(Part):
    def forward(self, x):
        y = self.lin(x)
        first, second = (torch.sin, torch.exp) if not is_recomputing() else (torch.exp, torch.sin)
        y = first(y)
        return second(y).cos()


def nothing(part, *inputs):
    pass


def flip(part, *inputs):
    part.flag = False


def change_global(part, *inputs):
    global SCALE
    SCALE = 3.0


def add_noise(part, *inputs):
    part.noise = 2.0


def overwrite(part, x, mask):
    mask.data.add_(1)


@dataclass(frozen=True)
class Fault:
    """A fault, and what a report must say of it.

    Attributes:
        between: what happens between forward and backward.
        check: the least that finds it: "default" sees shapes, types and numbers, "values" the rest.
        operator: the first one that differs, of the replay.
        module: where it ran.
        code: a part of the line that called it.
        cause: what is named first.
    """

    part: type[Part]
    between: Callable[..., None]
    check: str
    operator: str
    module: str
    code: str
    cause: str


FAULTS = {
    "a flipped branch": Fault(
        FlippedBranch,
        flip,
        "values",
        "aten.tanh.default",
        "block",
        "y.tanh()",
        "its attribute flag was True in forward",
    ),
    "a changed global": Fault(
        ChangedGlobal,
        change_global,
        "values",
        "aten.mul.Tensor",
        "block",
        "y * SCALE",
        "global SCALE was 2.0 in forward",
    ),
    "a missing autocast": Fault(
        MissingAutocast,
        nothing,
        "default",
        "aten.t.default",
        "block.lin (Linear)",
        "self.lin(x.sin())",
        "autocast: forward computed",
    ),
    "a router that picks other experts": Fault(
        Router, add_noise, "values", "aten.sub.Tensor", "block", "1 - self.noise", "its attribute noise was 0.0"
    ),
    "an in-place change of an input": Fault(
        ReadsInput,
        overwrite,
        "values",
        "aten.mul.Tensor",
        "block",
        "y * mask",
        "in-place changes of an input: argument 1",
    ),
    "a different device": Fault(
        OtherDevice, nothing, "default", "aten._to_copy.default", "block", 'y.to("meta")', "global state"
    ),
    "a shape that depends on a counter": Fault(
        CountedShape, nothing, "default", "aten.slice.Tensor", "block", "y[: self.step]", "its attribute step was 0"
    ),
    "an RNG that was not restored": Fault(
        LostGenerator, nothing, "values", "aten.bernoulli_.float", "block", "torch.dropout", "random numbers: the"
    ),
    "a dropped operator": Fault(
        DroppedOperator, nothing, "default", "aten.exp.default", "block", "y.exp()", "global state"
    ),
    "a swapped operator": Fault(
        SwappedOperators, nothing, "values", "aten.exp.default", "block", "first(y)", "global state"
    ),
}


class Model(nn.Module):
    """A model whose block is checkpointed, by its name."""

    def __init__(self, part: type[Part]) -> None:
        super().__init__()
        self.block = part()


def inputs_of(part: type[Part]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 8, requires_grad=True), *([torch.rand(4, 8)] if part is ReadsInput else [])]


@pytest.fixture(autouse=True)
def scale():
    global SCALE
    SCALE = 2.0


def refusal(fault: Fault, **options: Any) -> ReplayMismatchError:
    model = Model(fault.part)
    regrow.apply_checkpointing(
        model, fault.part, preserve_rng_state=fault.part is not LostGenerator, early_stop=False, **options
    )
    inputs = inputs_of(fault.part)
    loss = model.block(*inputs).sum()
    fault.between(model.block, *inputs)
    with pytest.raises(ReplayMismatchError) as error:
        loss.backward()
    assert inputs[0].grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    return error.value


def checked(fault: Fault) -> dict[str, Any]:
    """The least that finds the fault, with the operators listed."""
    return {"determinism_check": fault.check, "debug": True}


def code_at(line: str) -> str:
    path, number = line.split(" in ", 1)[0].rsplit(":", 1)
    assert path == __file__
    return linecache.getline(path, int(number)).strip()


@pytest.mark.parametrize("name", FAULTS)
def test_the_report_names_operator_module_and_line(name):
    """Rule 34: where the two executions part, in the user's own words."""
    fault = FAULTS[name]
    error = refusal(fault, **checked(fault))
    assert error.label == f"block ({fault.part.__name__}.forward)"
    assert fault.operator == error.operator
    assert ("block" if error.module == "" else f"block.{error.module}") == fault.module
    assert fault.code in code_at(error.line)
    message = str(error)
    assert f"; replay {error.operator} -> " in message
    assert error.line in message


@pytest.mark.parametrize("name", FAULTS)
def test_the_likely_cause_comes_first(name):
    """Rule 34: what there is evidence for, before what else it may be; all five are listed."""
    fault = FAULTS[name]
    error = refusal(fault, **checked(fault))
    assert len(error.causes) == 5
    assert fault.cause in error.causes[0]
    assert f"  1. {error.causes[0]}" in str(error)


@pytest.mark.parametrize("name", FAULTS)
def test_values_find_every_fault(name):
    """Rule 34: without a listing, the report is as precise."""
    fault = FAULTS[name]
    error = refusal(fault, determinism_check="values")
    assert fault.operator == error.operator
    assert "Operators of the forward:" not in str(error)
    assert "First difference, operator" in str(error)


@pytest.mark.parametrize("name", FAULTS)
def test_it_works_with_a_policy_and_with_a_context(name):
    """Rules 16 and 34: the operators are seen whatever else looks at them."""
    fault = FAULTS[name]
    from contextlib import nullcontext

    error = refusal(
        fault,
        determinism_check="values",
        policy_fn=lambda ctx, op, *args, **kwargs: op is torch.ops.aten.addmm.default,
        context_fn=lambda: (nullcontext(), nullcontext()),
    )
    if (
        fault.part is not MissingAutocast
    ):  # the policy keeps what autocast would have changed: other values, another place
        assert fault.operator == error.operator


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.check == "default"])
def test_without_debug_the_line_is_named_where_a_saved_tensor_differs(name):
    """Rule 34: the cheap check knows where the replay saved the first tensor that differs."""
    fault = FAULTS[name]
    error = refusal(fault)
    assert error.operator is None
    assert "debug=True" in str(error)
    if error.line is not None:
        assert error.line in str(error)
        code_at(error.line)


def test_an_input_that_is_changed_in_place_is_named_at_once():
    """Rules 4 and 34: where its version moved, nothing runs again to find out."""
    model = Model(ReadsInput)
    regrow.apply_checkpointing(model, ReadsInput)
    x, mask = inputs_of(ReadsInput)
    loss = model.block(x, mask=mask).sum()
    mask.add_(1)
    with pytest.raises(InputChangedError) as error:
        loss.backward()
    assert error.value.names == ["mask"]
    assert "block (ReadsInput.forward)" in str(error.value)


@pytest.mark.only("hooks", because="the reentrant engine compares no values")
@pytest.mark.parametrize("check", ["values", "sample"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=lambda dtype: str(dtype)[6:]
)
def test_a_function_that_repeats_itself_passes(engine, same, check, dtype):
    """Rules 1 and 34: gradients are those of the plain call; nothing is reported."""
    x = torch.randn(9, 9, dtype=dtype, requires_grad=True)
    w = torch.randn(9, 9, dtype=dtype)

    def function(t):
        y = (t @ w).sin()
        y = y[:, ::2] * y[:, 1::2].mean() + torch.empty_like(y[:, ::2]).fill_(1)
        return (y.abs() if dtype.is_complex else torch.rrelu(y, training=True)).sum()

    torch.manual_seed(1)
    want = torch.autograd.grad(function(x), x)
    torch.manual_seed(1)
    out = engine.checkpoint(function, x, determinism_check=check)
    same(torch.autograd.grad(out, x, retain_graph=True), want)
    same(torch.autograd.grad(out, x), want)


@pytest.mark.only("hooks", because="the reentrant engine compares no values")
def test_a_sample_finds_what_differs_everywhere(engine):
    """Rule 34: and may miss what differs in few places; that is what it costs less for."""
    x = torch.randn(4096, requires_grad=True)
    one_place = torch.zeros(4096)
    one_place[5] = 1e-3

    def backward(check, change):
        def function(t):
            return (t.sin() + changes[is_recomputing()]).cos()

        changes = [torch.zeros(4096), change]
        engine.checkpoint(function, x, determinism_check=check).sum().backward()

    for check, change in (("sample", one_place + 1e-3), ("values", one_place)):
        with pytest.raises(ReplayMismatchError) as error:
            backward(check, change)
        assert error.value.operator == "aten.add.Tensor"
    backward("sample", one_place)


@pytest.mark.only("hooks", because="the reentrant engine compares no values")
def test_a_permutation_is_another_value(engine):
    """Rule 34: the fingerprint knows where each element stands."""
    x = torch.randn(6, requires_grad=True)

    def function(t):
        index = torch.arange(6).flip(0) if is_recomputing() else torch.arange(6).flip(0).flip(0)
        return (t.detach()[index] * t).sin()

    with pytest.raises(ReplayMismatchError):
        engine.checkpoint(function, x, determinism_check="values").sum().backward()


@pytest.mark.only("hooks", because="the reentrant engine compares no values")
def test_a_selective_policy_that_meets_another_operator_is_explained(engine):
    """Rules 16 and 34: with the operators at hand, the report says where, not only which."""
    part = FlippedBranch()
    x = torch.randn(4, 8, requires_grad=True)
    loss = engine.checkpoint(part, x, debug=True, policy_fn=lambda ctx, op, *args, **kwargs: False).sum()
    part.flag = False
    with pytest.raises(ReplayMismatchError) as error:
        loss.backward()
    assert error.value.operator == "aten.tanh.default"
    assert type(error.value.__cause__) is CheckpointError


@pytest.mark.only("hooks", because="the reentrant engine compares no values")
def test_values_keep_no_tensor(engine, track, gc_off):
    """Rule 12: numbers and words are kept."""
    x = torch.randn(3, 4, requires_grad=True)
    out = engine.checkpoint(lambda t: track(track(t.sin()).exp()).cos(), x, determinism_check="values")
    assert track.alive == 0
    out.sum().backward()
    assert track.alive == 0


@pytest.mark.only("hooks", because="the reentrant engine compares no values")
def test_prefires_are_compared_too(engine):
    """Rules 11 and 34: the session holds nothing of a replay that is refused."""
    part = FlippedBranch()
    x = torch.randn(4, 8, requires_grad=True)
    with regrow.recompute_handle_collector_ctx() as handles:
        loss = engine.checkpoint(part, x, determinism_check="values").sum()
    part.flag = False
    with pytest.raises(ReplayMismatchError):
        regrow.recompute_handle(handles[0], "s")
    assert "replayed" not in regrow.memory_report().bytes_by("kind")
    part.flag = True
    loss.backward()
