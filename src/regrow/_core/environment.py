"""What surrounds a call: RNG, autocast, modes. Captured in forward, re-entered for a replay, and left untouched after.

Nothing is entered that already is as forward had it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from regrow import errors
from regrow._core import compat, devices

_CPU = torch.device("cpu")

Autocast = tuple[str, bool, torch.dtype]


class Environment:
    """The surroundings of one forward.

    Memory: one generator state (about 5 KB on CPU) per device in play, for as long as the frame lives.
    """

    __slots__ = ("autocast", "autocast_cache", "function_modes", "rng", "sleeping")

    def __init__(self, tensors: Sequence[torch.Tensor], *, preserve_rng: bool) -> None:
        """Capture the surroundings of this thread, and the devices on which ``tensors`` lie."""
        found = devices.in_play(tensors)
        default = devices.default_type()
        module = devices.module_of(default)
        awake = module is not None and devices.is_awake(module)
        if awake and not found and default != "cpu":
            found = [torch.device(default, module.current_device())] if hasattr(module, "current_device") else []
        self.sleeping: str | None = default if preserve_rng and module is not None and not awake else None
        self.rng: list[tuple[torch.device, torch.Tensor]] = _rng_states([_CPU, *found]) if preserve_rng else []
        self.autocast = tuple(_autocast(kind) for kind in dict.fromkeys(["cpu", *(device.type for device in found)]))
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.function_modes: tuple[Any, ...] = compat.function_modes() if compat.function_mode_count() else ()

    def check_devices(self, label: str) -> None:
        """Refuse a device that was first used inside forward: its generator was not captured."""
        if self.sleeping is not None and devices.is_awake(devices.module_of(self.sleeping)):
            raise RuntimeError(errors.device_woke_up(label, self.sleeping))

    def restored(self) -> Restored:
        """A context in which this thread is as forward was; the thread's own state is back when it is left."""
        return Restored(self)


class Restored:
    """The context of `Environment.restored`: one use."""

    __slots__ = ("_environment", "_rng", "_stack", "_was_grad")

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._stack: ExitStack | None = None
        self._rng: list[tuple[torch.device, torch.Tensor]] = []
        self._was_grad = False

    def __enter__(self) -> None:
        environment = self._environment
        self._was_grad = torch.is_grad_enabled()
        stack = ExitStack()
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        for kind, enabled, dtype in environment.autocast:
            if _autocast(kind) != (kind, enabled, dtype) or (
                enabled and torch.is_autocast_cache_enabled() != environment.autocast_cache
            ):
                cache = environment.autocast_cache
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache))
        if environment.function_modes or compat.function_mode_count():
            _enter_function_modes(stack, environment.function_modes)
        torch.set_grad_enabled(True)
        self._rng = _rng_states([device for device, _ in environment.rng])
        for device, state in environment.rng:
            devices.set_rng_state(device, state)
        self._stack = stack

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for device, state in self._rng:
            devices.set_rng_state(device, state)
        torch.set_grad_enabled(self._was_grad)
        if self._stack is not None:
            self._stack.close()


def _rng_states(wanted: list[torch.device]) -> list[tuple[torch.device, torch.Tensor]]:
    found = [(device, devices.rng_state(device)) for device in wanted]
    return [(device, state) for device, state in found if state is not None]


def _autocast(kind: str) -> Autocast:
    if kind != "cpu" and not torch.amp.is_autocast_available(kind):
        return kind, False, torch.float32
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _enter_function_modes(stack: ExitStack, modes: tuple[Any, ...]) -> None:
    mine = compat.swap_function_modes(0, modes)
    stack.callback(compat.swap_function_modes, 0, mine)
