"""Slots: what autograd holds in place of saved tensors. The slot owns its value, so a graph node that dies frees it.

graph node --> slot --> value          frame - - weak - - > slot
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import ref

import torch

from regrow._core.frame import Owner
from regrow._core.storages import storage_bytes

# What a saved tensor looks like: shape, dtype, and True for the CPU or else the device.
Look = tuple[torch.Size, torch.dtype, torch.device | bool]


# What a frame keeps of each saved tensor: its slot, weakly, and what it looks like; None where that is not compared.
Saved = tuple["ref[Slot]", "torch.Size | None", "torch.dtype | None", "torch.device | bool | None"]


def look(tensor: torch.Tensor) -> Look:
    """What a tensor looks like."""
    return tensor.shape, tensor.dtype, tensor.is_cpu or tensor.device


class Slot:
    """One saved tensor's place. Fields are unset until a replay fills them, which keeps forward cheap.

    Attributes:
        owner: whose value it is.
        value: the regrown tensor; None once it was let go.
        version: the value's version when the replay saved it.
        others: values of further owners and their versions, when backward calls overlap.
    """

    __slots__ = ("__weakref__", "others", "owner", "value", "version")

    owner: Owner
    value: torch.Tensor | None
    version: int
    others: dict[Owner, tuple[torch.Tensor, int]]


def put(slot: Slot, owner: Owner, value: torch.Tensor) -> None:
    """Fill a slot for an owner and keep what others hold. A session takes the first place, which is read fast."""
    holder = getattr(slot, "owner", None)
    if holder is not None and holder != owner and slot.value is not None:
        if not hasattr(slot, "others"):
            slot.others = {}
        if not isinstance(holder, int):
            slot.others[owner] = (value, value._version)
            return
        slot.others[holder] = (slot.value, slot.version)
    slot.version = value._version
    slot.value = value
    slot.owner = owner


def take(slot: Slot, owner: Owner, *, consume: bool) -> tuple[torch.Tensor | None, bool]:
    """An owner's value, let go if ``consume``, and whether it is as the replay saved it. No value: None, True."""
    if getattr(slot, "owner", None) == owner:
        value = slot.value
        if value is not None:
            if consume:
                slot.value = None
            return value, value._version == slot.version
    others: dict[Owner, tuple[torch.Tensor, int]] | None = getattr(slot, "others", None)
    if not others or owner not in others:
        return None, True
    value, version = others.pop(owner) if consume else others[owner]
    return value, value._version == version


def holds(slot: Slot, owner: Owner) -> bool:
    """Whether a slot holds a value of an owner."""
    return take(slot, owner, consume=False)[0] is not None


def kept_in(slot: Slot) -> list[torch.Tensor]:
    """The values of a slot, whoever owns them."""
    value = getattr(slot, "value", None)
    others = getattr(slot, "others", None) or {}
    return [*([] if value is None else [value]), *(other for other, _ in others.values())]


def alive(saved: list[Saved]) -> Iterator[tuple[int, Slot]]:
    """The slots that graph nodes still hold, with their places."""
    for index, (place, _, _, _) in enumerate(saved):
        slot = place()
        if slot is not None:
            yield index, slot


def values_of(saved: list[Saved], owner: Owner) -> list[torch.Tensor]:
    """What an owner holds now."""
    filled = [slot for slot in [place() for place, _, _, _ in saved] if slot is not None]
    try:
        owners = {id(slot.owner) for slot in filled}
    except AttributeError:  # no replay has filled one of them yet
        owners = set()
    if owners == {id(owner)}:  # as it is when a replay has just ended
        return [value for value in [slot.value for slot in filled] if value is not None]
    return [value for value in [take(slot, owner, consume=False)[0] for slot in filled] if value is not None]


def held_bytes(saved: list[Saved], owner: Owner) -> dict[int, int]:
    """Bytes of an owner's values, by storage; tensors without a storage of their own are left out."""
    return storage_bytes(values_of(saved, owner))


def drop(saved: list[Saved], owner: Owner) -> None:
    """Let go of every value of an owner."""
    for place, _, _, _ in saved:
        slot = place()
        if slot is not None:
            take(slot, owner, consume=True)


def hand_over(saved: list[Saved], owner: Owner, to: Owner) -> None:
    """Values of an owner are another's from now on."""
    for _, slot in alive(saved):
        if getattr(slot, "owner", None) == owner:
            slot.owner = to
        others = getattr(slot, "others", None)
        if others and owner in others:
            others[to] = others.pop(owner)


def live_count(saved: list[Saved]) -> int:
    """How many slots there are up to the last one that a graph node still holds."""
    count = len(saved)
    if count and saved[-1][0]() is not None:
        return count
    for place, _, _, _ in reversed(saved):
        if place() is not None:
            break
        count -= 1
    return count


def index_of(saved: list[Saved], slot: Slot) -> int:
    """The place of a slot in forward's order. For messages only."""
    return next(index for index, (place, _, _, _) in enumerate(saved) if place() is slot)


def describe(meta: Look) -> str:
    """A saved tensor in a message: ``(2, 64) float32 cpu``."""
    shape, dtype, device = meta
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} {'cpu' if device is True else device}"
