"""The front door: importing regrow imports no framework, and nothing of torch is changed by using it."""

import ast
import json
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

import regrow

HOME = Path(regrow.__file__).parent


@pytest.fixture(scope="module")
def fresh(fresh_process):
    """What a fresh interpreter has loaded, after each of a row of imports."""
    program = """
import json, sys

def loaded():
    return sorted(name for name in ("torch", "mindspore", "numpy", "rich", "typer") if name in sys.modules)

seen = {}
import regrow
seen["regrow"] = loaded()
import regrow.errors, regrow.arguments
seen["regrow.errors"] = loaded()
regrow.RegrowError, regrow.__version__, dir(regrow), regrow.__all__
seen["names that need none"] = loaded()
try:
    regrow.nothing_of_the_kind
except AttributeError as error:
    seen["message"] = str(error)
seen["unknown name"] = loaded()
regrow.checkpoint
seen["checkpoint"] = loaded()
print(json.dumps(seen))
"""
    return json.loads(fresh_process(program))


@pytest.mark.parametrize("step", ["regrow", "regrow.errors", "names that need none", "unknown name"])
def test_importing_loads_no_framework(fresh, step):
    """Rule 20: in a fresh process, step by step."""
    assert fresh[step] == []


def test_the_first_use_loads_torch(fresh):
    """Rule 20: and nothing that the command line needs."""
    assert "torch" in fresh["checkpoint"]
    assert not {"mindspore", "rich", "typer"} & set(fresh["checkpoint"])


def test_an_unknown_name_is_an_attribute_error(fresh):
    """Rule 20: the table of names says what there is not."""
    assert fresh["message"] == "module 'regrow' has no attribute 'nothing_of_the_kind'"


def test_every_public_name_is_there_and_listed():
    """Rule 20: the lazy table, ``__all__``, ``dir`` and the typed stub are one list."""
    names = set(regrow.__all__)
    assert {name for name in names if not hasattr(regrow, name)} == set()
    assert names <= set(dir(regrow))
    stub = ast.parse((HOME / "__init__.pyi").read_text())
    imported = {
        alias.asname or alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert names <= imported


def test_every_public_name_has_a_docstring():
    """Rule 20: functions and classes that a user may import say what they do."""
    assert [name for name in regrow.__all__ if not (getattr(regrow, name).__doc__ or "").strip()] == []


MODULES = [
    torch,
    torch_checkpoint,
    torch.autograd,
    torch.autograd.graph,
    torch.autograd.function,
    torch.autograd.Function,
    torch.autograd.variable.Variable,
    torch.overrides,
    torch.utils._python_dispatch,
    torch.nn.Module,
    torch.Tensor,
    torch.random,
    torch.amp,
]


def identities():
    return {
        (str(module), name): id(value)
        for module in MODULES
        for name, value in vars(module).items()
        if not name.startswith("__") and callable(value)
    }


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
def test_no_attribute_of_torch_is_assigned_by_use(engine):
    """Rule 23: every function and class of the modules in reach is the same object before and after."""
    before = identities()
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    wrapped = regrow.checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = torch.randn(2, 4, requires_grad=True)
    with regrow.recompute_handle_collector_ctx() as handles:
        kept = engine.checkpoint(net, x, policy_fn=lambda ctx, op, *args, **kwargs: True, debug=True)
    regrow.recompute_handle(handles[0], "session")
    with regrow.recompute_session_ctx("session"):
        kept.sum().backward()
    regrow.clear_recompute_session("session")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.checkpoint(lambda t: wrapped(t).sin(), x).sum().backward()
    after = identities()
    assert [name for name in before if after.get(name) != before[name]] == []


def test_no_module_assigns_to_an_attribute_of_torch():
    """Rule 23: read in the source: no assignment, deletion or ``setattr`` reaches into torch."""
    found = []
    for path in sorted(HOME.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
                targets.append(node.args[0])
            found += [
                f"{path.name}:{node.lineno}"
                for target in targets
                if isinstance(target, ast.AST) and reaches_torch(target)
            ]
    assert found == []


def reaches_torch(target):
    """Whether an expression is ``torch``, or something of it."""
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
        if isinstance(target, ast.Name) and target.id in ("torch", "nn", "F"):
            return True
    return False


def test_private_names_of_torch_live_in_the_compat_modules():
    """Rule 23: no other module says ``torch._something`` or imports from one."""
    found = []
    for path in sorted(HOME.rglob("*.py")):
        if path.name in ("compat.py", "_compat.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                dotted = ast.unparse(node)
                if dotted.startswith("torch.") and not dotted.startswith("torch.ops."):
                    found.append(f"{path.name}: {dotted}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [node.module, *(alias.name for alias in node.names)]
                found += [f"{path.name}: {name}" for name in names if any(part[:1] == "_" for part in name.split("."))]
    allowed = "torch.utils._python_dispatch"  # the documented home of TorchDispatchMode
    assert [place for place in found if not place.endswith(allowed)] == []


def test_a_missing_private_name_is_named_when_regrow_is_first_used(fresh_process):
    """Rule 23: with the version of torch that lacks it, and why it is needed."""
    said = fresh_process(
        """
import torch
import regrow
del torch._C._current_graph_task_id
try:
    regrow.checkpoint
except ImportError as error:
    print(error)
"""
    )
    assert (
        f"regrow needs torch._C._current_graph_task_id (it tells backward calls apart), which torch {torch.__version__}"
        in said
    )
