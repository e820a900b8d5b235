"""Devices and their random generators, through ``torch.get_device_module`` alone. Must never name a vendor."""

from __future__ import annotations

from collections.abc import Iterable
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


def in_play(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices other than CPU on which tensors lie, each once, in order."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_cpu))


def default_type() -> str:
    """The type a function may use although none of its inputs lies there: torch's accelerator, or its default."""
    accelerator = torch.accelerator.current_accelerator()
    return DefaultDeviceType.get_device_type() if accelerator is None else accelerator.type


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
