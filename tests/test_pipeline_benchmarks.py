"""The benchmarks of pipelines: virtual time against what can be counted by hand, and one quick run on two ranks."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

PIPELINES = Path(__file__).resolve().parent.parent / "benchmarks" / "pipelines"
MODULES = ("emulation", "layouts", "programs", "results", "simulation", "virtual")


@pytest.fixture
def bench():
    """The modules of the benchmarks, which are scripts next to each other and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PIPELINES)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})


@pytest.fixture
def units(bench):
    """Step times of a schedule in every way."""

    def units(name, n_ranks, n_microbatches, latency):
        return bench.virtual.rows_of(name, n_ranks, n_microbatches, latency)["units"]

    return units


@pytest.mark.parametrize(("way", "per_microbatch"), [("none", 6), ("lazy", 8), ("torch", 8)])
def test_without_latency_1f1b_takes_what_its_formula_says(units, way, per_microbatch):
    """Micro-batches and ranks less one, times a stage's forward and backward, of two units each way, and its replay."""
    assert units("1F1B", 4, 8, 0.0)[way] == (8 + 4 - 1) * per_microbatch


def test_on_one_rank_a_split_step_takes_the_sum_of_its_parts(units):
    """Four micro-batches on two stages; torch replays the second once for dx and six times for dw, the first once."""
    split = units("ZBV", 1, 4, 1.0)
    assert split["none"] == 4 * 2 * 3
    assert split["lazy"] == 4 * 2 * 4
    assert split["torch"] == 4 * 2 * 4 + 4 * 6


def test_a_prefire_costs_nothing_where_the_rank_would_wait_for_longer(units):
    """Two ranks, one micro-batch: the first rank replays while the second is at work."""
    found = units("1F1B", 2, 1, 0.0)
    assert found["none"] == 4 + 8
    assert found["lazy"] - found["on_wait"] == 2


@pytest.mark.parametrize("name", ["LoopedBFS", "Interleaved1F1B", "InterleavedZB", "ZBV", "DualPipeV"])
def test_no_way_is_faster_than_none_nor_slower_than_lazy_on_the_whole(units, name):
    found = units(name, 4, 8, 1.0)
    assert found["none"] < min(found["on_wait"], found["on_any_wait"], found["default"])
    assert max(found["on_wait"], found["default"]) < found["lazy"] <= found["torch"]


@pytest.mark.parametrize(
    ("n_ranks", "v", "stages"), [(4, True, [[0, 7], [1, 6], [2, 5], [3, 4]]), (2, False, [[0, 2], [1, 3]])]
)
def test_stages_go_there_and_back_or_round_and_round(bench, n_ranks, v, stages):
    layout = bench.layouts.Layout("a", list, 2, v=v)
    assert [layout.stages_of(rank, n_ranks) for rank in range(n_ranks)] == stages


def test_every_action_of_a_program_is_there_once(bench):
    programs = bench.programs.programs_of(bench.layouts.LAYOUTS["DualPipeV"], 2, 8)
    computed = [action for rank in range(2) for action in programs.computed(rank)]
    forwards = {action.key for action in computed if action.kind is bench.programs.Kind.FORWARD}
    backwards = [action.key for action in computed if action.kind in bench.programs.BACKWARDS]
    assert len(set(computed)) == len(computed)
    assert forwards == set(backwards) == {(stage, microbatch) for stage in range(4) for microbatch in range(8)}


def test_ranks_that_wait_for_each_other_are_reported(bench):
    action, kind = bench.programs.Action, bench.programs.Kind
    programs = bench.programs.Programs(2, {0: 0, 1: 1}, [[], [action(kind.FORWARD, 1, 0)]])
    with pytest.raises(RuntimeError, match="1 ranks wait for messages that nobody sends"):
        bench.simulation.step_units(programs, bench.simulation.WAYS["none"], bench.simulation.Cost())


def test_a_sleeping_block_takes_its_time_in_forward_dx_and_dw(bench, monkeypatch):
    spent = []
    monkeypatch.setattr(bench.emulation, "pace", SimpleNamespace(work=spent.append))
    block = bench.emulation.SleepingBlock(6.0)
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    output = block(x)
    assert spent == [6.0]
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert spent == [6.0, 6.0]
    torch.autograd.grad(output.sum(), list(block.weights))
    assert sum(spent[2:]) == 6.0 + 6.0  # what leads to the weights runs once more, and the six of them share a unit


@pytest.mark.parametrize(
    ("value", "at_least", "met"), [(0.5, False, True), (0.6, False, False), (0.4, True, False), (None, True, None)]
)
def test_a_target_is_a_limit_from_above_or_from_below(bench, value, at_least, met):
    assert bench.results.Target("a", value, 0.5, at_least=at_least).met is met


def test_a_name_that_is_not_known_is_refused_with_those_that_are(bench):
    with pytest.raises(SystemExit, match=r"--schedules: no 'ZBW' among ZBV, DualPipeV"):
        bench.results.chosen("ZBW", ["ZBV", "DualPipeV"], "--schedules")


def test_check_exits_with_one_when_a_target_is_missed(bench, tmp_path, capsys):
    """LoopedBFS has next to no time in which a replay could hide."""
    out = tmp_path / "rows.jsonl"
    with pytest.raises(typer.Exit):
        bench.virtual.main(schedules="LoopedBFS", sizes="2x4", latencies="1", json=out, check=True)
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["schedule"], row["ranks"], row["stages"], row["microbatches"]) == ("LoopedBFS", 2, 4, 4)
    assert "LoopedBFS, 2 ranks, 4 micro-batches, on_wait removes" in capsys.readouterr().out


def test_a_quick_run_trains_with_real_arithmetic_and_the_same_gradients(tmp_path):
    """The command as its user runs it."""
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-W", "error", str(PIPELINES / "real.py"), "--quick", "--rounds", "1"]
    choice = ["--schedules", "ZBV", "--contenders", "default,graft"]
    result = subprocess.run(
        [*command, *choice, "--json", str(out)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    rows = {row["contender"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert {name: row["runs"] for name, row in rows.items()} == {
        "none": [1, 1, 1, 1],
        "torch": [2, 8, 8, 8],
        "default": [2, 2, 2, 1],
        "graft": [2, 2, 2, 1],
    }
    assert all(row["same_gradients"] for row in rows.values())
    assert all(peak > 0 for row in rows.values() for peak in row["peak_bytes"])
