"""Complaints: a line each on stderr, with who was asked. Must never print anything else."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def complain(command: str, faults: Iterable[str]) -> None:
    """Say what is wrong.

    Args:
        command: as it was typed, without its options.
        faults: sentences.
    """
    for fault in faults:
        sys.stderr.write(f"{command}: {fault}\n")
