"""Devices and their random generators, through ``torch.get_device_module`` alone. Must never name a vendor."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import DefaultDeviceType


def module_of(device_type: str) -> Any | None:
    """The module that drives a type of device; None for types that have none, such as ``meta``."""
    try:
        return torch.get_device_module(device_type)
    except (RuntimeError, AttributeError):
        return None


def is_awake(module: Any) -> bool:
    """Whether a device has been initialised; a module that does not say so always is."""
    asked = getattr(module, "is_initialized", None)
    return True if asked is None else bool(asked())


# The answer of `spare_type` by torch's default type, which is what a machine without an accelerator asks every call.
_spare: dict[str, str | None] = {}


def spare_type() -> str | None:
    """The type of device that a function may use although no input lies there; None if this machine has none."""
    kind: str = DefaultDeviceType.get_device_type()
    if kind not in _spare:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        candidate = kind if accelerator is None else accelerator.type
        if candidate == "cpu":
            return _spare.setdefault(kind, None)
        module = module_of(candidate)
        if module is None:
            return None  # asked again: a module may be registered later
        available = getattr(module, "is_available", None)
        _spare[kind] = candidate if available is None or available() else None
    return _spare[kind]


def current_of(kind: str) -> list[torch.device]:
    """The current device of a type; none if the type sleeps, or does not say."""
    module = module_of(kind)
    if module is None or not hasattr(module, "current_device") or not is_awake(module):
        return []
    return [torch.device(kind, module.current_device())]


def is_asleep(kind: str) -> bool:
    """Whether a type of device has not been initialised yet."""
    module = module_of(kind)
    return module is not None and not is_awake(module)


def rng_state(device: torch.device) -> torch.Tensor | None:
    """The state of a device's default generator; None where it has none."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module = module_of(device.type)
    return None if module is None or not hasattr(module, "get_rng_state") else module.get_rng_state(device)


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of a device's default generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)
