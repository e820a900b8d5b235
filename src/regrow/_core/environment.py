"""What surrounds a call: RNG, autocast, modes. Captured in forward, re-entered for a replay, and left untouched after.

Nothing is entered that already is as forward had it, and what is at its default is not asked twice: both run once per
call, on the path that a checkpoint is judged by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from types import TracebackType
from typing import Any

import torch

from regrow import errors
from regrow._core import ambient, compat, devices, flags_compat, streams

_cpu_generator = torch.default_generator
_CPU = torch.device("cpu")
_on_cpu = attrgetter("is_cpu")
_device_of = attrgetter("device")

Autocast = tuple[str, bool, torch.dtype]
DeviceStates = tuple[tuple[torch.device, torch.Tensor], ...]


class Environment:
    """The surroundings of one forward.

    Memory: one generator state (about 5 KB on CPU) per device in play, for as long as the frame lives.
    """

    # On the class: what nearly no call has costs nothing to leave out.
    cpu_rng: torch.Tensor | None = None
    device_rng: DeviceStates = ()
    device_autocast: tuple[Autocast, ...] = ()
    function_modes: tuple[Any, ...] = ()
    registered: tuple[Any, ...] = ()
    # Who was asked what operators do, with ``__torch_function__``. In a backward that begins at a tensor of a subclass
    # torch asks no subclass.
    asked = compat.ALL
    # Where forward queued its work: on every device in play that has streams.
    streams: streams.Streams = ()
    # A device that sleeps now must not wake up inside forward: its generator could not be captured.
    sleeping: str | None = None

    def __init__(self, tensors: Sequence[torch.Tensor], *, preserve_rng: bool) -> None:
        """Capture the surroundings of this thread, and of the devices on which ``tensors`` lie."""
        found = [] if all(map(_on_cpu, tensors)) else [tensor.device for tensor in tensors if not tensor.is_cpu]
        spare = devices.spare_type()
        if spare is not None and spare not in [device.type for device in found]:
            found += devices.current_of(spare)
        if preserve_rng:
            self.cpu_rng = _cpu_generator.get_state()
            if found:
                self.device_rng = _device_states(dict.fromkeys(found))
            if spare is not None and devices.is_asleep(spare):
                self.sleeping = spare
        if found or spare is not None:
            kinds = [device.type for device in found] + ([] if spare is None else [spare])
            self.device_autocast = _device_autocast(dict.fromkeys(kinds))
            self.streams = streams.current(dict.fromkeys(found))
        self.surroundings = flags_compat.surroundings()
        if ambient.registrations:
            self.registered = ambient.captured()
        if compat.function_mode_count():
            self.function_modes = compat.function_modes()
        if not compat.asks_all():
            self.asked = compat.asked()

    def include(self, tensors: Callable[[], list[torch.Tensor]]) -> None:
        """Forward uses the devices on which these lie, too; they are asked for where there is more than the CPU."""
        if devices.spare_type() is None:
            return
        known = {device for device, _ in self.device_rng} | {device for device, _ in self.streams}
        more = [device for device in dict.fromkeys(map(_device_of, tensors())) if device.type != "cpu"]
        more = [device for device in more if device not in known]
        if more:
            self.streams += streams.current(more)
            self.device_rng += () if self.cpu_rng is None else _device_states(more)

    def generator_states(self) -> list[torch.Tensor]:
        """The states of generators that are held."""
        states = [state for _, state in self.device_rng]
        return states if self.cpu_rng is None else [self.cpu_rng, *states]

    @property
    def casts(self) -> bool:
        """Whether autocast was on and kept what it had cast."""
        around = self.surroundings
        on_cpu: bool = around[0]
        return bool(around[2]) and (on_cpu or any(enabled for _, enabled, _ in self.device_autocast))

    def check_devices(self, label: str) -> None:
        """Refuse a device that was first used inside forward."""
        if self.sleeping is not None and not devices.is_asleep(self.sleeping):
            raise RuntimeError(errors.device_woke_up(label, self.sleeping))

    def rng_devices(self) -> list[torch.device]:
        """The devices whose generators a replay rewinds."""
        return [] if self.cpu_rng is None else [_CPU, *(device for device, _ in self.device_rng)]

    def differs_from(self, here: tuple[Any, ...]) -> bool:
        """Whether anything but RNG and grad mode is not here as it was in forward."""
        return (
            here != self.surroundings
            or not (compat.asks_all() if self.asked is compat.ALL else compat.asked() is self.asked)
            or compat.function_mode_count() > 0
            or self.function_modes != ()
            or self.registered != ()
            or (self.device_autocast != () and self.device_autocast_differs())
        )

    def device_autocast_differs(self) -> bool:
        """Whether autocast of the devices in play is not here as it was in forward."""
        wanted = self.device_autocast
        return wanted != () and _device_autocast(kind for kind, _, _ in wanted) != wanted


class Restored:
    """A context in which this thread is as forward was; the thread's own state is back when it is left. One use."""

    _stack: ExitStack | None = None
    _cpu_rng: torch.Tensor | None = None
    _device_rng: DeviceStates = ()
    _recast = False

    def __init__(self, environment: Environment, *, apart: bool = False) -> None:
        """Prepare it; ``apart`` says that work inside is on other streams than the caller's, so casts must be, too."""
        self._environment = environment
        self._apart = apart

    @property
    def casts_anew(self) -> bool:
        """Whether casts that the caller's autocast keeps are not found inside."""
        return self._recast

    def __enter__(self) -> None:
        environment = self._environment
        self._was_grad = torch.is_grad_enabled()
        self._found = flags_compat.surroundings()
        try:
            if environment.differs_from(self._found):
                self._stack = ExitStack()
                self._recast = _enter(self._stack, environment)
            if self._apart and not self._recast:
                self._stack = self._stack or ExitStack()
                self._stack.enter_context(uncached())
            compat.set_grad_enabled(True)
            if environment.cpu_rng is not None:
                self._cpu_rng = _cpu_generator.get_state()
                _cpu_generator.set_state(environment.cpu_rng)
            if environment.device_rng:
                self._device_rng = _device_states([device for device, _ in environment.device_rng])
                _set_device_states(environment.device_rng)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._cpu_rng is not None:
            _cpu_generator.set_state(self._cpu_rng)
        if self._stack is not None:
            self._stack.close()
        compat.set_grad_enabled(self._was_grad)
        if (
            flags_compat.surroundings() != self._found
        ):  # set for the replay, or left by a function that stopped too early
            ambient.set_flags(self._found)
        if self._device_rng:  # last: a device that is gone must not keep the rest from coming back
            _set_device_states(self._device_rng)


def _enter(stack: ExitStack, environment: Environment) -> bool:
    """Enter what is not here as it was in forward; whether autocast was."""
    if compat.asked() is not environment.asked:
        stack.enter_context(compat.asking(environment.asked))
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(mode=False))
    recast = flags_compat.surroundings()[:3] != environment.surroundings[:3] or environment.device_autocast_differs()
    if recast:
        _enter_autocast(stack, environment)
    mine = compat.swap_function_modes(0, environment.function_modes)
    stack.callback(compat.swap_function_modes, 0, mine)
    ambient.enter(stack, environment.surroundings, environment.registered)
    return recast


def _enter_autocast(stack: ExitStack, environment: Environment) -> None:
    # Weights that the caller's autocast has cast, perhaps to another type, must not be found in the replay, nor the
    # replay's own by the caller; and forgetting them would change the last bits of the caller's gradients.
    on_cpu, cpu_dtype, cache, *_ = environment.surroundings
    cache = cache and not (compat.inside_autocast() and torch.is_autocast_cache_enabled())
    if cache:
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
    for kind, enabled, dtype in (("cpu", on_cpu, cpu_dtype), *environment.device_autocast):
        stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache))


@contextmanager
def uncached() -> Iterator[None]:
    """Autocast casts anew: what it casts inside is not found outside, nor the other way round."""
    if not (torch.is_autocast_cache_enabled() and compat.inside_autocast()):
        yield
        return
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


def _device_states(wanted: Iterable[torch.device]) -> DeviceStates:
    found = ((device, devices.rng_state(device)) for device in wanted)
    return tuple((device, state) for device, state in found if state is not None)


def _set_device_states(states: DeviceStates) -> None:
    for device, state in states:
        devices.set_rng_state(device, state)


def _device_autocast(kinds: Iterable[str]) -> tuple[Autocast, ...]:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.amp.is_autocast_available(kind)
    )
