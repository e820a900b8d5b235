"""What is done with the replays of a schedule: a frozen value, checked where it is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PREFIRE = ("off", "on_wait", "on_any_wait")
RETENTION = ("all", "needed", "none")
KEEP = ("auto", "never")

Retention = str | Callable[[int, int], str]
Keep = str | Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices of `attach`; what a stage does without it is the default of each.

    Attributes:
        prefire: when replays start before backward asks for them.
        retention: what is kept between dx and dw.
        keep: which micro-batches are not dropped at all.
        prefire_bytes: what the prefires of a full backward may hold; None for one frame.
    """

    prefire: str = "off"
    retention: Retention = "needed"
    keep: Keep = "never"
    prefire_bytes: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant; ValueError with the name, the value and what is allowed."""
        _check_choice("prefire", self.prefire, PREFIRE)
        if not callable(self.retention):
            _check_choice("retention", self.retention, RETENTION, "a function of (stage_index, microbatch)")
        if not callable(self.keep):
            _check_choice("keep", self.keep, KEEP, "a function of (stage_index, microbatch)")
        value = self.prefire_bytes
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
            raise ValueError(f"prefire_bytes must be None or a number of bytes, 0 to {math.inf}, got {value!r}.")

    def retention_of(self, stage_index: int, microbatch: int) -> str:
        """What is kept of one micro-batch between dx and dw."""
        if not callable(self.retention):
            return self.retention
        answer = self.retention(stage_index, microbatch)
        if answer not in RETENTION:
            raise ValueError(
                f"retention({stage_index}, {microbatch}) returned {answer!r}; "
                f"it must return one of {_listed(RETENTION)}."
            )
        return answer

    def keeps(self, stage_index: int, microbatch: int, *, follows: bool) -> bool:
        """Whether one micro-batch is not dropped; ``follows``: its backward comes right after its forward."""
        if not callable(self.keep):
            return self.keep == "auto" and follows
        answer = self.keep(stage_index, microbatch)
        if answer is not True and answer is not False:
            raise ValueError(f"keep({stage_index}, {microbatch}) returned {answer!r}; it must return True or False.")
        return answer


def _check_choice(name: str, value: Any, allowed: tuple[str, ...], other: str = "") -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {_listed(allowed)}{', or ' + other if other else ''}, got {value!r}.")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)
