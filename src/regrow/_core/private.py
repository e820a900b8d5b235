"""How private names of torch are asked for: one that is missing is named, and why it is needed. Must never hold one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

# Every private name that was asked for, and why.
internals: dict[str, str] = {}


def ask(module: str, path: str, why: str) -> Any:
    internals[f"{module}.{path}"] = why
    found: Any = import_module(module)
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ImportError(
            f"regrow needs {module}.{path} ({why}), which torch {torch.__version__} does not have. "
            "Install a torch version in the range that regrow declares, or report this version."
        ) from None
    return found
