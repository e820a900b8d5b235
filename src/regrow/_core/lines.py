"""Which line of user code runs, and in which module. Must never keep a Python frame."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

from regrow._core import _compat

if TYPE_CHECKING:
    from torch import nn

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = (str(Path(torch.__file__).parent), _OURS, contextlib.__file__)


def user_line() -> str:
    """The innermost line that is neither torch's nor regrow's: ``file:line in function``."""
    for frame in _outwards(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return "an unknown line"


def modules_here() -> list[nn.Module]:
    """The modules whose call is under way inside the checkpointed call that runs here, the innermost first."""
    found: list[nn.Module] = []
    for frame in _outwards(sys._getframe(1)):
        code = frame.f_code
        if code is _compat.module_call:
            found.append(frame.f_locals["self"])
        elif code.co_filename.startswith(_OURS) and code.co_name in _RUNS_A_CALL:
            break
    return found


# The functions of an engine that call the user's.
_RUNS_A_CALL = ("_forward", "_call")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
