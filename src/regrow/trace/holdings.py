"""What calls and sessions hold now. Nothing is registered for it in forward: Python's collector knows every object."""

from __future__ import annotations

import gc

from regrow._core.frame import Frame, Owner
from regrow._core.session import Session
from regrow._core.storages import sole_bytes, storage_bytes
from regrow._core.telling import name_of
from regrow.trace.report import Found, Report, report

_REGROWN = ("kept", "replayed")
_ORDER = ("input", "generator state", *_REGROWN)


def memory_report() -> Report:
    """List what checkpointed calls and sessions hold now, by function, shape and type.

    Kinds are "input" (from the call until its graph dies), "generator state", "kept" (by selective checkpointing) and
    "replayed" (by a session or a backward). A storage counts once, in the first of these that holds it. What a replay
    has saved again and something else keeps alive, such as a parameter, does not show, nor does what saved-tensor hooks
    of yours took away.

    Returns:
        A report: ``print`` it, or read ``rows``, ``total_bytes``, ``bytes_by("session")``, ``to_json()``.

    Memory: keeps nothing. It walks all objects that Python's collector knows, some 50 ms for a million; calls made
        before a ``gc.freeze()`` do not show.

    Threads: any; what others hold changes while it looks.
    """
    # By type alone: an object of user code may claim to be of any class, or do work when it is asked.
    frames: list[Frame] = [each for each in gc.get_objects() if Frame in type(each).__mro__]
    frames.sort(key=lambda frame: frame.label)
    held = [(frame, holding) for frame in frames for holding in frame.holdings()]
    held.sort(key=lambda pair: _ORDER.index(pair[1].kind))
    found = [Found(frame.label, each.kind, _owner_name(each.owner), each.tensor) for frame, each in held]
    return report(without_lent(found))


def without_lent(found: list[Found]) -> list[Found]:
    """What is held, without what a replay has saved again of parameters and whatever else is there anyway."""
    sole = sole_bytes(each.tensor for each in found)
    return [each for each in found if each.kind not in _REGROWN or storage_bytes([each.tensor]).keys() <= sole.keys()]


def _owner_name(owner: Owner) -> str:
    if isinstance(owner, Session):
        return name_of(owner.id)
    return "" if owner is None else "a backward"
