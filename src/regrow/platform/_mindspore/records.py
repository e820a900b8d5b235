"""MindSpore's own record of a call, read and mended: how far a replay has come, what is left of it. No state of ours.

A record keeps, by key: how many tensors the replay has saved, whether it has ended, and its values. Values hang weakly
on the placeholders that the graph of forward holds.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

Key = Hashable


def count(record: Any) -> int:
    """How many tensors forward saved."""
    return len(record.placeholders)


def is_dead(record: Any) -> bool:
    """Whether the graph of forward holds nothing of it any more."""
    return count(record) > 0 and all(place() is None for place in record.placeholders)


def unfinished(record: Any) -> list[Key]:
    """The keys of replays that have begun and not ended."""
    return [key for key in record.placeholder_counter if not record.is_recomputed.get(key, False)]


def come_to(record: Any, key: Key) -> int:
    """How many tensors a replay has saved."""
    saved: int = record.placeholder_counter.get(key, 0)
    return saved


def has_let_go(record: Any, key: Key) -> bool:
    """Whether a replay has ended, and something that backward may still ask for is gone from it."""
    if not record.is_recomputed.get(key, False):
        return False
    held = record.recomputed_data.get(key, {})
    places = (place() for place in record.placeholders)
    return any(place is not None and place not in held for place in places)


def forget(record: Any, key: Key) -> None:
    """Drop a replay, ended or not: the next read makes another."""
    record.clear_session(key)
