"""docs/tiny.py tells the idea of the engine; it runs the same programs as the engine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.parity.parity_programs import PROGRAMS
from tests.parity.test_parity_programs import backward, built, forward, plain


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parents[1] / "docs" / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny"] = module
    spec.loader.exec_module(module)
    return module


# What the one-file engine leaves out, as its docstring says.
NEEDS_THE_REST = {
    "attention_by_hand": "random numbers",
    "autocast_around": "autocast",
    "dropout_of_every_kind": "random numbers",
    "gru_over_a_sequence": "random numbers",
    "nested_checkpoints": "random numbers",
    "noise_is_the_last_thing_saved": "random numbers",
    "stop_gradients_inside": "random numbers",
    "transformer_layer": "random numbers",
}


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - set(NEEDS_THE_REST)))
def test_the_idea_in_one_file_gives_the_gradients_of_the_plain_call(tiny: ModuleType, name: str) -> None:
    """Rule 1: what the engine does is this idea, and the idea is right."""
    expected_case, case = built(PROGRAMS[name], plain), built(PROGRAMS[name], tiny.checkpoint)
    expected = backward(expected_case, forward(expected_case, plain))
    got = backward(case, forward(case, tiny.checkpoint))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_split_backward_replays_once_in_a_session_and_twice_without(tiny: ModuleType) -> None:
    """Rule 9: the picture of the README, in numbers."""
    weight = torch.rand(4, 4, requires_grad=True)
    x = torch.rand(4, 4, requires_grad=True)
    runs = []

    def block(t: torch.Tensor) -> torch.Tensor:
        runs.append("run")
        return (t @ weight).sin()

    loss = tiny.checkpoint(block, x).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(loss, weight)
    without = len(runs) - 1
    runs.clear()
    with tiny.session_ctx("s", retain=True):
        loss = tiny.checkpoint(block, x).sum()
        torch.autograd.grad(loss, x, retain_graph=True)
    with tiny.session_ctx("s", retain=False):
        torch.autograd.grad(loss, weight)
    tiny.clear("s")
    assert (without, len(runs) - 1) == (2, 1)
