"""The check for accelerators, on the CPU: all that means something there is right, and a check can fail."""

import importlib
import json
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import regrow

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("gpu_check", "accelerator_checks", "stream_checks", "subject")


@pytest.fixture
def tool():
    """The script and what it checks, which stand next to each other and are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})


@pytest.fixture
def setting(tool):
    return tool.subject.Setting(torch.device("cpu"), quick=True)


def test_every_check_that_means_something_on_a_cpu_is_right_there(tmp_path):
    """The whole script, as it is started on a machine that has nothing but the source tree."""
    program = [sys.executable, "-W", "error", ROOT / "tools/gpu_check.py", "--device", "cpu", "--quick"]
    done = subprocess.run([*program, "--out", tmp_path / "found.json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["machine"]["torch"] == torch.__version__
    assert {result["check"]: result["outcome"] for result in found["results"]} == {
        "random numbers": "ok",
        "mixed precision": "ok",
        "worker threads": "ok",
        "side stream": "n.a.",
        "bytes at peak": "ok",
        "zero bubble": "ok",
        "host cost": "ok",
    }


@pytest.mark.parametrize(
    ("check", "checkpoint", "why"),
    [
        ("random numbers", partial(regrow.checkpoint, preserve_rng_state=False), "gradient 0 of 13"),
        ("mixed precision", torch_checkpoint, "blocks ran"),
        ("bytes at peak", lambda function, *args, use_reentrant: function(*args), "holds more than"),
        ("zero bubble", torch_checkpoint, "blocks ran"),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_does_less_is_found_out(tool, setting, monkeypatch, check, checkpoint, why):
    """What is not right is called wrong, and the script's exit status says so."""
    monkeypatch.setattr(regrow, "checkpoint", checkpoint)
    checks = {check: tool.accelerator_checks.CHECKS[check]}
    (result,) = tool.gpu_check.results(setting, checks, limit_s=60.0)
    assert result.outcome == "wrong"
    assert why in result.why


class NoStreams:
    """A device module and a stream at once: everything is done where it is asked for, and never said to be over."""

    def __init__(self):
        self.Stream = self.current_stream = self.record_event = lambda: self
        self.synchronize = lambda: None
        self.query = lambda: False
        self.stream = lambda stream: nullcontext()


def test_the_check_of_streams_runs_through(tool, monkeypatch):
    """There is no stream here; what it does around them is right, and without anything beside a replay it says so."""
    monkeypatch.setattr(tool.subject.Setting, "module", NoStreams())
    monkeypatch.setattr(tool.subject.Setting, "on_cpu", False)
    setting = tool.subject.Setting(torch.device("cpu"), quick=True)
    assert tool.stream_checks.side_stream(setting)["replays beside which forward's stream got work done"] == 6
    setting.module.query = lambda: True
    with pytest.raises(tool.subject.WrongError, match="nothing ran beside"):
        tool.stream_checks.side_stream(setting)


def test_what_does_not_get_its_turn_is_no_success(tool, monkeypatch, capsys):
    """No check begins after the limit."""
    assert tool.gpu_check.main(["--device", "cpu", "--quick", "--limit-s", "-1"]) == 1
    assert capsys.readouterr().out.count("not run") == len(tool.accelerator_checks.CHECKS)
