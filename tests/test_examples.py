"""The examples run, prove what they print, and stay short; a plain training script needs one changed line."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("0[1-8]_*.py"))
OURS = "from regrow import checkpoint"
THEIRS = "from torch.utils.checkpoint import checkpoint"


def printed(path, capfd):
    """What a script prints; also what processes that it starts do."""
    capfd.readouterr()
    runpy.run_path(str(path), run_name="__main__")
    return capfd.readouterr().out


def test_there_are_eight():
    """Numbered in the order of reading, each at most 80 lines with what it prints said at its top."""
    assert [path.name[:2] for path in EXAMPLES] == [f"0{number}" for number in range(1, 9)]
    assert [path.name for path in EXAMPLES if len(path.read_text(encoding="utf-8").splitlines()) > 80] == []
    assert [path.name for path in EXAMPLES if "Prints " not in path.read_text(encoding="utf-8").split('"""')[1]] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_it_proves(path, capfd):
    """Rules 1, 6, 9, 16, 17, 26, 28 and 39: each asserts what it prints."""
    lines = printed(path, capfd).splitlines()
    assert len(lines) >= 3
    assert [line for line in lines if "False" in line] == []


def test_only_the_import_line_is_changed(tmp_path, capfd):
    """Rule 1: a script of torch's checkpoint prints the same with regrow's, losses to the last bit."""
    ours = next(path for path in EXAMPLES if path.stem == "01_drop_in")
    script = ours.read_text(encoding="utf-8")
    (line,) = (line for line in script.splitlines() if line.startswith(OURS))
    theirs = tmp_path / "with_torch.py"
    theirs.write_text(script.replace(line, THEIRS), encoding="utf-8")
    assert "regrow" not in theirs.read_text(encoding="utf-8").split('"""')[2]
    assert printed(ours, capfd) == printed(theirs, capfd)
