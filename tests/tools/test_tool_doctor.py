"""`regrow doctor`: it says what is here, and it does not fail where torch does."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from regrow import __version__
from regrow._core import private
from tests.test_demo import typed


def test_it_says_versions_devices_internals_and_what_works():
    """Rule 23: private names are counted where they are used; a checkpoint is compared with plain autograd."""
    result = typed("doctor")
    assert result.exit_code == 0
    said = result.stdout.split("\n")
    assert said[0] == "versions"
    for line in (
        f"regrow {__version__}",
        "checkpoints all found",
        f"in use {len(private.internals)} private names",
        "pipelines yes",
        "cpu the same, bit for bit",
    ):
        assert line in [" ".join(each.split()) for each in said], line
    assert any(torch.__version__ in line for line in said)


def test_json_names_every_internal_with_its_reason():
    """Rule 23: for whoever compares two installations."""
    read = json.loads(typed("doctor", "--json").stdout)
    assert read["works"] is True
    assert read["internals"] == private.internals
    assert read["internals"]["torch._C._current_graph_task_id"] == "it tells backward calls apart"
    assert read["sections"]["available"]["pipelines"] == {"value": "yes", "good": True}


def test_a_missing_internal_is_named_and_the_rest_is_told():
    """Rule 23: an older or newer torch is what it is asked about."""
    program = "import torch; del torch._C._current_graph_task_id; from regrow.cli import main; main()"
    command = [sys.executable, "-c", program, "doctor"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stderr
    assert "regrow needs torch._C._current_graph_task_id (it tells backward calls apart)" in result.stdout
    assert "checkpoint, sessions, tools  no: regrow needs" in result.stdout
    assert "messages between ranks" in result.stdout
    assert result.stderr == ""


def test_help_does_not_wait_for_torch():
    """Rule 20: the table of commands is light."""
    program = "import sys; from regrow.cli.app import run; run(['doctor', '--help']); print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip().endswith("False")
