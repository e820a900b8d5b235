"""Which line of user code runs. Must never keep a Python frame."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)


def user_line() -> str:
    """The innermost line that is neither torch's nor regrow's: ``file:line in function``."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_back is None:
            return "an unknown line"
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
