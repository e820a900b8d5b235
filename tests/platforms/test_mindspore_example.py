"""The MindSpore example trains the same network three ways; it is run as its reader would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.platforms.adapters import installed

EXAMPLE = Path(__file__).parents[2] / "examples" / "09_mindspore.py"


@pytest.mark.skipif(not installed("mindspore"), reason="MindSpore is not installed here")
def test_the_example_trains_to_the_same_loss():
    """Rule 9, rule 32: one replay per block and step, lazily and with prefire, dx and dw apart."""
    done = subprocess.run([sys.executable, EXAMPLE], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("plain", "lazily", "prefired", "losses"))]
    assert [line.rpartition(", ")[2] for line in lines] == [
        "1 runs of a block per step",
        "2 runs of a block per step",
        "2 runs of a block per step",
        "losses are equal bit for bit",
    ]
    assert len({line.partition("loss")[2].partition(",")[0] for line in lines[:3]}) == 1
