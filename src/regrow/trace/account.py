"""An account: what the events of some calls add up to. Must never know which calls these are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Account:
    """Counts of replays, and what they held.

    Attributes:
        forwards: calls that were made.
        replays: how often they were run again: lazy and prefired, failed ones too.
        lazy: replays that backward asked for.
        prefired: replays that a scheduler asked for.
        in_time: prefires that were there when backward came, of those that are released.
        late: prefires that backward had to wait for, or had not waited for.
        wasted: prefires that were released before any backward read them.
        failed: replays that raised.
        held_bytes: what replays hold now.
        peak_bytes: the most that they held at once.
        byte_s: bytes times the seconds for which they were held.
        replay_s: seconds of replay, those of calls inside it included.
    """

    forwards: int = 0
    replays: int = 0
    lazy: int = 0
    prefired: int = 0
    in_time: int = 0
    late: int = 0
    wasted: int = 0
    failed: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    byte_s: float = 0.0
    replay_s: float = 0.0
    _since_ns: int = field(default=0, repr=False)

    def hold(self, change_bytes: int, at_ns: int) -> None:
        """More or less is held from now on."""
        self.settle(at_ns)
        self.held_bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def settle(self, at_ns: int) -> None:
        """Add up what was held until now."""
        if at_ns > self._since_ns:
            self.byte_s += self.held_bytes * (at_ns - self._since_ns) / 1e9
            self._since_ns = at_ns

    def figures(self) -> dict[str, Any]:
        """Everything by name."""
        return {name: getattr(self, name) for name in NAMES}


NAMES = tuple(name for name in Account.__dataclass_fields__ if not name.startswith("_"))
