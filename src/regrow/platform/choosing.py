"""Choosing a platform: by argument, by environment, torch by default. Must never import the framework not chosen."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

from regrow.platform.base import Platform
from regrow.platform.on_mindspore import MindSporePlatform
from regrow.platform.on_torch import TorchPlatform

VARIABLE = "REGROW_PLATFORM"
_KNOWN: dict[str, Callable[[], Platform]] = {
    TorchPlatform.name: TorchPlatform,
    MindSporePlatform.name: MindSporePlatform,
}


def get_platform(name: str | None = None) -> Platform:
    """The platform object of a framework: the same one every time. Imports the framework, and no other.

    Args:
        name: "torch" or "mindspore". None asks the environment variable ``REGROW_PLATFORM``; if that is not set, or
            empty, it is "torch".

    Returns:
        The platform.

    Raises:
        ValueError: an unknown name; the sentence lists the known ones and says where the name came from.
        ImportError: the framework is not installed, or lacks a private name that regrow needs.
    """
    source = "name"
    if name is None and os.environ.get(VARIABLE):
        name, source = os.environ[VARIABLE], f"the environment variable {VARIABLE}"
    elif name is None:
        name = TorchPlatform.name
    if name not in _KNOWN:
        known = ", ".join(repr(each) for each in _KNOWN)
        raise ValueError(f"{source} must be one of {known}, got {name!r}.")
    return _made(name)


@cache
def _made(name: str) -> Platform:
    return _KNOWN[name]()
