"""Import a module while Ctrl-C is awaited. Must never import more than the standard library has.

An interrupt that is raised in the midst of an import may be lost there (importlib's own callbacks swallow it), or come
back as another error. So while modules load, Ctrl-C ends the process at once: nothing is under way yet.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from types import ModuleType

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def load(name: str) -> ModuleType:
    """Import a module; whoever has set another answer to Ctrl-C keeps it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return import_module(name)
    signal.signal(signal.SIGINT, leave)
    try:
        return import_module(name)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(*_: object) -> None:
    """End the process at once, as an answer to a signal."""
    os._exit(INTERRUPTED)
