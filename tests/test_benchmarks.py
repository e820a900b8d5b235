"""The benchmarks: their arithmetic, how they take turns, and one quick run. No test looks at a time."""

from __future__ import annotations

import gc
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

import regrow

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
MODULES = ("figures", "harness", "host_cost", "observation", "report", "variants")
VARIANTS = ["plain", "floor", "regrow", "torch", "regrow reentrant", "torch reentrant"]


@pytest.fixture
def bench():
    """The modules of the benchmarks, which are scripts next to each other and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})


@pytest.fixture
def leaf():
    return torch.tensor([1.0, 2.0], requires_grad=True)


def rows_of(bench, regrow_ns, at_most, phase="STEP"):
    """Rows of one case and phase, where plain takes 100 ns and torch adds 100 ns."""
    samples = {"plain": [100.0] * 3, "torch": [200.0] * 3, "regrow": regrow_ns}
    return [
        bench.report.Row(
            case="case",
            phase=bench.harness.Phase[phase],
            variant=name,
            repeats=1,
            n_saved=4,
            figures=figures,
            ratio_of=bench.figures.RatioOf.ADDED,
            at_most=at_most if name == "regrow" else None,
        )
        for name, figures in bench.figures.compare(samples).items()
    ]


def test_a_spread_has_quartiles_that_count_its_ends(bench):
    spread = bench.figures.Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert spread == bench.figures.Spread(n=5, minimum=1.0, lower=2.0, median=3.0, upper=4.0)


def test_a_spread_of_one_value_is_that_value(bench):
    assert bench.figures.Spread.of([7.0]) == bench.figures.Spread(n=1, minimum=7.0, lower=7.0, median=7.0, upper=7.0)


def test_ratios_are_taken_within_a_round(bench):
    """A round that is ten times slower for all moves the medians apart, and no ratio."""
    figures = bench.figures.compare({"plain": [1.0, 10.0], "torch": [3.0, 30.0], "mine": [2.0, 20.0]})["mine"]
    added, total = (figures.ratios[of] for of in (bench.figures.RatioOf.ADDED, bench.figures.RatioOf.TOTAL))
    assert (added.lower, added.upper) == (0.5, 0.5)
    assert (total.lower, total.upper) == (2 / 3, 2 / 3)
    assert figures.added_ns == bench.figures.Spread.of([1.0, 10.0])


def test_a_round_in_which_torch_added_nothing_has_no_ratio(bench):
    samples = {"plain": [1.0, 5.0, 1.0], "torch": [3.0, 5.0, 3.0], "mine": [2.0, 9.0, 2.0]}
    ratio = bench.figures.compare(samples)["mine"].ratios[bench.figures.RatioOf.ADDED]
    assert (ratio.n, ratio.median) == (2, 0.5)


def test_a_ratio_that_no_round_has_is_none_and_misses_its_target(bench):
    figures = bench.figures.compare({"plain": [5.0], "torch": [3.0], "regrow": [4.0]})["regrow"]
    row = bench.report.Row(
        "case", bench.harness.Phase.STEP, "regrow", 1, 1, figures, bench.figures.RatioOf.ADDED, at_most=0.5
    )
    assert row.ratio is None
    assert row.met is False


@pytest.mark.parametrize(("at_most", "met"), [(0.5, True), (0.49, False), (None, None)])
def test_a_target_is_met_by_the_median_of_the_ratio(bench, at_most, met):
    *_, row = rows_of(bench, [110.0, 150.0, 190.0], at_most)
    assert row.met is met


def test_a_line_of_json_says_what_was_measured_where(bench, tmp_path):
    machine = bench.report.Machine.now()
    rows = rows_of(bench, [110.0, 150.0, 190.0], 0.6)
    bench.report.write_json(tmp_path / "rows.jsonl", rows, machine)
    plain, _, mine = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert mine == {
        "case": "case",
        "phase": "forward+backward",
        "variant": "regrow",
        "repeats": 1,
        "n_saved": 4,
        "n_samples": 3,
        "time_ns": {"n": 3, "minimum": 110.0, "lower": 130.0, "median": 150.0, "upper": 170.0},
        "added_ns": {"n": 3, "minimum": 10.0, "lower": 30.0, "median": 50.0, "upper": 70.0},
        "added_per_saved_ns": 12.5,
        "added_ratio": {"n": 3, "minimum": 0.1, "lower": 0.3, "median": 0.5, "upper": 0.7},
        "total_ratio": {"n": 3, "minimum": 0.55, "lower": 0.65, "median": 0.75, "upper": 0.85},
        "ratio": "added_ratio",
        "target": 0.6,
        "met": True,
        "regrow": regrow.__version__,
        "torch": torch.__version__,
        "python": machine.python,
        "platform": machine.platform,
        "cpu_count": machine.cpu_count,
        "load_average": machine.load_average,
    }
    assert (plain["target"], plain["met"]) == (None, None)


def test_variants_take_turns_in_an_order_that_changes(bench, leaf):
    calls = []

    def variant(name):
        def forward():
            calls.append(name)
            return leaf * 2

        return bench.harness.Variant(name, forward)

    plan = bench.harness.Plan(rounds=8, warm_up=2)
    samples = bench.harness.measure([variant(n) for n in "abc"], torch.ones(2), repeats=1, plan=plan)
    rounds = [tuple(calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert len(rounds) == 10
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) > 1
    assert {len(kept) for by_name in samples.values() for kept in by_name.values()} == {8}


def test_nothing_is_collected_while_the_clock_runs(bench, leaf):
    """What runs in a sample, and that process and threads are afterwards as before."""
    seen = []

    def forward():
        seen.append((gc.isenabled(), torch.get_num_threads()))
        return leaf * 2

    before = gc.isenabled(), torch.get_num_threads()
    plan = bench.harness.Plan(rounds=1, warm_up=0)
    bench.harness.measure([bench.harness.Variant("a", forward)], torch.ones(2), repeats=2, plan=plan)
    assert seen == [(False, 1)] * 2
    assert (gc.isenabled(), torch.get_num_threads()) == before
    assert gc.get_freeze_count() == 0


def test_variants_that_differ_by_a_bit_are_named_and_not_timed(bench, leaf):
    def variant(name, factor):
        return bench.harness.Variant(name, lambda: leaf * factor)

    ladder = [variant("plain", 2.0), variant("same", 2.0), variant("other", 2.0000002)]
    with pytest.raises(bench.harness.GradientMismatchError, match=r"other: .* not those of plain") as caught:
        bench.harness.check_same(ladder, [leaf], torch.ones(2))
    assert caught.value.variants == ("other",)


def test_the_floor_replays_once(bench, leaf):
    n_runs = 0

    def function(x):
        nonlocal n_runs
        n_runs += 1
        return x.sin().cos().exp()

    bench.variants.floor(function, leaf).sum().backward()
    assert n_runs == 2
    assert bench.variants.count_saved(function, leaf) == 3


def results_of(bench, at_most):
    """Stands in for timing a case: regrow adds half of what torch adds."""

    def run(case, plan):
        return [row for phase in ("FORWARD", "STEP") for row in rows_of(bench, [150.0] * 3, at_most, phase)]

    return run


def test_check_exits_with_one_when_a_target_is_missed(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.host_cost, "run", results_of(bench, at_most=0.49))
    with pytest.raises(typer.Exit) as ended:
        bench.host_cost.main(quick=True, check=True)
    assert ended.value.exit_code == 1
    assert "targets missed: case, forward; case, forward+backward" in capsys.readouterr().out


def test_check_returns_when_all_targets_are_met(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.host_cost, "run", results_of(bench, at_most=0.5))
    bench.host_cost.main(quick=True, check=True)
    assert "targets missed: none" in capsys.readouterr().out


def test_a_quick_run_checks_and_times_every_variant(tmp_path):
    """The command as its user runs it."""
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-W", "error", str(BENCHMARKS / "host_cost.py"), "--quick", "--rounds", "2"]
    result = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    again = ["regrow reentrant"]  # compared with torch's reentrant checkpoint as well
    assert [row["variant"] for row in rows] == (VARIANTS * 2 + again) * 2 + VARIANTS * 2
    assert {(row["case"], row["n_saved"]) for row in rows[:26]} == {("200 operations", 200), ("1 operation", 1)}
    targets = [(row["phase"], row["ratio"], row["target"]) for row in rows if row["target"] is not None]
    assert targets == [
        ("forward", "added_ratio", 0.40),
        ("forward+backward", "added_ratio", 0.48),
        ("forward+backward", "added_ratio", 0.18),
        ("forward+backward", "reentrant_ratio", 1.0),
        ("forward", "added_ratio", 0.35),
        ("forward+backward", "added_ratio", 0.35),
        ("forward+backward", "reentrant_ratio", 0.6),
        ("forward+backward", "total_ratio", 1.02),
    ]
    assert all(name in result.stdout for name in VARIANTS)
    assert "targets missed" in result.stdout


def test_the_benchmark_of_saved_regions_runs_and_counts():
    """Rule 29: a region holds what torch's selective checkpoint holds, and no more."""
    script = BENCHMARKS / "save_regions" / "measure.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [re.findall(r"[\w ,-]+", line) for line in done.stdout.splitlines() if "│" in line]
    held: dict[str, list[int]] = {}
    for name, n_bytes, *_ in ([cell.strip() for cell in row] for row in rows):
        held.setdefault(name, []).append(int(n_bytes.replace(",", "")))
    assert len(held["torch SAC"]) == 2
    assert held["regrow, region"] == held["torch SAC"]


def test_looking_on_is_measured_in_a_quick_run(bench):
    """Rule 32: the number of events is a count, and does not depend on the machine."""
    command = [sys.executable, str(BENCHMARKS / "observation.py"), "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    assert lines[1].split()[-4:] == ["4", "at", "most", "6"]
    assert bench.observation.events_of(bench.observation.split_step) <= bench.observation.EVENTS
