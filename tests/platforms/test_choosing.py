"""Which platform is chosen, what choosing one imports, and what every platform has. Needs either framework."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from regrow.platform import MindSporePlatform, Platform, TorchPlatform, get_platform
from tests.platforms.adapters import installed

ROOT = Path(__file__).parents[2]
VERBS = [
    "checkpoint",
    "checkpoint_wrapper",
    "checkpoint_exclude_wrapper",
    "recompute_handle_collector_ctx",
    "recompute_handle",
    "recompute_session_ctx",
    "clear_recompute_session",
]

needs_torch = pytest.mark.skipif(not installed("torch"), reason="torch is not installed here")
needs_mindspore = pytest.mark.skipif(not installed("mindspore"), reason="MindSpore is not installed here")
without_mindspore = pytest.mark.skipif(installed("mindspore"), reason="MindSpore is installed here")

# Notes every attempt to import a framework, also one that fails because it is not installed.
WATCHED = """
import sys

class Watch:
    def __init__(self):
        self.asked = set()
    def find_spec(self, name, path=None, target=None):
        self.asked.add(name.partition(".")[0])

watch = Watch()
sys.meta_path.insert(0, watch)

def frameworks():
    return sorted(watch.asked & {"torch", "mindspore"})
"""


def test_importing_the_platforms_imports_no_framework(in_a_process):
    """Rule 20, rule 33: nor does asking for an unknown one."""
    program = """
import regrow.platform
from regrow.platform import MindSporePlatform, TorchPlatform
try:
    regrow.platform.get_platform("jax")
except ValueError:
    print(frameworks())
"""
    assert in_a_process(WATCHED + program) == "[]"


@needs_torch
def test_choosing_torch_does_not_ask_for_mindspore(in_a_process):
    """Rule 38: in a fresh process, also while it is used."""
    program = """
import torch
import regrow.platform
platform = regrow.platform.get_platform()
with platform.recompute_handle_collector_ctx() as handles:
    loss = platform.checkpoint(torch.sin, torch.ones(2, requires_grad=True)).sum()
platform.recompute_handle(handles[0], "s")
platform.clear_recompute_session("s")
loss.backward()
print(frameworks())
"""
    assert in_a_process(WATCHED + program, REGROW_PLATFORM="") == "['torch']"


@needs_mindspore
def test_choosing_mindspore_does_not_ask_for_torch(in_a_process):
    """Rule 38: in a fresh process, also while it is used. MindSpore itself may look whether there is a torch."""
    program = """
import mindspore
mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
mindspore.set_device("CPU")
watch.asked.discard("torch")
import regrow
import regrow.platform
platform = regrow.platform.get_platform()
def forward(x):
    with platform.recompute_handle_collector_ctx() as handles:
        output = platform.checkpoint(mindspore.ops.sin, x)
    platform.recompute_handle(handles[0], "s")
    return output.sum()
with platform.recompute_session_ctx("s", retain_on_unpack=True):
    mindspore.grad(forward)(mindspore.Tensor([1.0, 2.0]))
platform.clear_recompute_session("s")
regrow.is_recomputing()
print(frameworks())
"""
    assert in_a_process(WATCHED + program, REGROW_PLATFORM="mindspore").splitlines()[-1] == "['mindspore']"


def test_the_argument_comes_before_the_environment(in_a_process):
    """Rule 38: argument, then REGROW_PLATFORM, then torch; an empty variable is none."""
    program = """
from regrow.platform import choosing
choosing._KNOWN = {name: (lambda name=name: name) for name in choosing._KNOWN}
print(choosing.get_platform(), choosing.get_platform("torch"), choosing.get_platform("mindspore"))
"""
    assert in_a_process(program, REGROW_PLATFORM="mindspore") == "mindspore torch mindspore"
    assert in_a_process(program, REGROW_PLATFORM="") == "torch torch mindspore"


def test_an_unknown_name_lists_the_known_ones(monkeypatch):
    """Rule 19, rule 33: and says where it came from."""
    with pytest.raises(ValueError, match=r"name must be one of 'torch', 'mindspore', got 'jax'"):
        get_platform("jax")
    monkeypatch.setenv("REGROW_PLATFORM", "Torch")
    with pytest.raises(ValueError, match=r"variable REGROW_PLATFORM must be one of 'torch', 'mindspore', got 'Torch'"):
        get_platform()


def test_a_platform_is_one_object(on):
    """Rule 38: and says which it is."""
    assert get_platform(on.name) is get_platform(on.name)
    assert (repr(on.platform), isinstance(on.platform, Platform)) == (f"<platform {on.name}>", True)


@without_mindspore
def test_without_mindspore_the_sentence_says_what_to_install():
    """Rule 38: one sentence, when it is chosen."""
    with pytest.raises(ImportError, match=r"MindSpore is not installed.*pip install 'mindspore==2.10.0' 'numpy<2'"):
        get_platform("mindspore")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_on_both_with_the_same_arguments(verb):
    """Rule 37: the same names and the same parameters, documented."""
    parameters = [
        {name: (each.kind, each.default) for name, each in inspect.signature(getattr(kind, verb)).parameters.items()}
        for kind in (Platform, TorchPlatform, MindSporePlatform)
    ]
    assert parameters[0] == parameters[1] == parameters[2]
    assert all(getattr(kind, verb).__doc__ for kind in (Platform, TorchPlatform, MindSporePlatform))
    assert getattr(Platform, verb).__isabstractmethod__


@needs_torch
@pytest.mark.parametrize("verb", VERBS[1:])
def test_the_torch_verbs_take_what_the_front_door_takes(verb):
    """Rule 37: checkpoint takes its options as keywords, the others are the same by name."""
    import regrow

    theirs = list(inspect.signature(getattr(regrow, verb)).parameters)
    assert list(inspect.signature(getattr(TorchPlatform, verb)).parameters)[1:] == theirs


def test_every_difference_in_the_table_has_a_test():
    """Rule 37: a row in docs/platforms.md is named by the test that shows it, and the other way round."""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs/platforms.md").read_text(), re.M)
    tree = ast.parse((Path(__file__).parent / "test_mindspore.py").read_text())
    told = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    shown = {name for text in told for name in re.findall(r"Difference: (.+?)\.", text)}
    assert set(rows) == shown
    assert len(rows) == len(set(rows))
