"""A number and what it counts, as one says it. Must never grow into a grammar."""

from __future__ import annotations


def counted(n: int, one: str, many: str = "") -> str:
    """`1 block`, `4 blocks`; the plural takes an s if none is given."""
    return f"{n} {one if n == 1 else many or one + 's'}"
