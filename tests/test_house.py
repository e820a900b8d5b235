"""The house keeps its own rules: every rule has a test, every name has its place, the front door is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import regrow

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
RULES = [int(number) for number in re.findall(r"^\*\*Rule (\d+)\.", (ROOT / "docs/design/rules.md").read_text(), re.M)]
CITATION = re.compile(r"\b[Rr]ules? (\d+(?:(?:, | and |, rule )\d+)*)")


def cited(text: str) -> set[int]:
    return {int(number) for citation in CITATION.findall(text) for number in re.findall(r"\d+", citation)}


def docstrings_of_tests() -> list[str]:
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        found += [ast.get_docstring(node) or "" for node in functions if node.name.startswith("test_")]
    return found


def in_a_fresh_process(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_the_rules_are_numbered_without_gaps() -> None:
    """Rule 41 came last: a new rule takes the next number and its place by theme, and no number changes its meaning."""
    assert list(range(1, len(RULES) + 1)) == sorted(RULES)


def test_every_rule_is_proved_by_a_test() -> None:
    """A rule that no test cites is a promise that nobody keeps."""
    proved = set().union(*(cited(text) for text in docstrings_of_tests()))
    assert set(RULES) - proved == set()


def test_only_rules_that_exist_are_cited() -> None:
    """A citation of a rule that is gone misleads."""
    everywhere = [path.read_text() for path in SOURCES] + docstrings_of_tests()
    assert set().union(*map(cited, everywhere)) <= set(RULES)


def test_importing_the_front_door_imports_no_framework() -> None:
    """Rule 20: a configuration tool may import regrow, its errors and its checks without waiting for torch."""
    program = "import sys, regrow, regrow.errors, regrow.arguments; print('torch' in sys.modules)"
    assert in_a_fresh_process(program) == "False"


def test_every_name_of_the_front_door_is_there_and_typed() -> None:
    """Rule 20: the table of names, what they lead to, and the stub that types them agree."""
    stub = ast.parse((ROOT / "src/regrow/__init__.pyi").read_text())
    typed = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == set(regrow.__all__)
    assert all(getattr(regrow, name) is not None for name in regrow.__all__)


def test_every_public_name_has_a_docstring() -> None:
    """Rule 19: what a user may call says what it takes."""
    assert [name for name in regrow.__all__ if not getattr(regrow, name).__doc__] == []


def test_private_torch_names_stand_in_compat_modules_only() -> None:
    """Rule 23: each private name of torch stands in one place, with its reason."""
    private = re.compile(r"torch(?:\.\w+)*\._[A-Za-z]\w*|from torch(?:\.\w+)*\._\w+|from torch\._\w+")
    # The documented home of TorchDispatchMode, and an operator, which is data.
    allowed = {"torch.utils._python_dispatch", "torch.ops.aten._to_copy"}
    found = {
        f"{path.name}: {name}"
        for path in SOURCES
        if not path.stem.endswith("compat")
        for name in private.findall(path.read_text())
        if name.removeprefix("from ") not in allowed
    }
    assert found == set()


def test_nothing_of_torch_is_assigned() -> None:
    """Rule 23: no module assigns an attribute of torch."""
    assignment = re.compile(r"^\s*torch(?:\.\w+)+\s*=[^=]", re.M)
    assert [path.name for path in SOURCES if assignment.search(path.read_text())] == []


def test_modules_are_small() -> None:
    """One idea per module: past 400 lines there is a second one."""
    assert [path.name for path in SOURCES if len(path.read_text().splitlines()) > 400] == []
