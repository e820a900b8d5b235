"""Bytes of a step, from the profiler's own record of allocations. Must never ask regrow's counters.

Each allocation adds its bytes and each release takes them away again, summed from where the step starts. What was there
before, such as parameters, gradients and the optimizer's state, does not count.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_CPU = 0  # "Device Type" of the host, in the trace


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a step keeps alive: at most, and when the rank's first backward begins."""

    peak_bytes: int
    retained_bytes: int


@dataclass(frozen=True, slots=True)
class Marks:
    """The names that a step gives ``torch.profiler.record_function``: around itself, and around each backward."""

    step: str
    backward: str


def measure(step: Callable[[], object], device: torch.device, marks: Marks) -> Footprint | None:
    """Run a step twice under the profiler, and sum the allocations of the second time.

    The profiler does not see the release of what was allocated before it began, or takes it for that of something else.
    What a step keeps for the next one is therefore allocated under the profiler, too.

    Args:
        step: what to run.
        device: whose memory counts.
        marks: what it marks; when its first backward begins, the retained bytes are read.

    Returns:
        The bytes, or None where the profiler hears of no allocation: not every device reports them.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library writes to stderr without being asked
    gc.collect()  # garbage of earlier steps that is freed in this one would count as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        step()
    events = _events(profiler)
    changes = _changes([event for event in events if _is_allocation(event, device)])
    if not changes:
        return None
    start, end = max(_spans(events, marks.step))
    first_backward = min(begin for begin, _ in _spans(events, marks.backward) if begin >= start)
    return _summed([change for change in changes if start <= change[0] <= end], first_backward)


def _changes(allocations: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """When bytes came and went. What was not seen to come does not go: its size may be that of another address."""
    sizes: dict[int, int] = {}
    found: list[tuple[float, int]] = []
    for event in sorted(allocations, key=itemgetter("ts")):
        address, n_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        if n_bytes > 0:
            sizes[address] = n_bytes
        found.append((event["ts"], n_bytes if n_bytes > 0 else -sizes.pop(address, 0)))
    return found


def _summed(changes: list[tuple[float, int]], first_backward: float) -> Footprint:
    live = peak = retained = 0
    for time_us, n_bytes in changes:
        live += n_bytes
        peak = max(peak, live)
        if time_us <= first_backward:
            retained = live
    return Footprint(peak, retained)


def _events(profiler: profile) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _is_allocation(event: dict[str, Any], device: torch.device) -> bool:
    if event.get("name") != "[memory]":
        return False
    args = event["args"]
    if device.type == "cpu":
        return bool(args["Device Type"] == _CPU)
    return bool(args["Device Type"] != _CPU and args["Device Id"] == (device.index or 0))


def _spans(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Start and end of all that is marked so."""
    marked = (event for event in events if event.get("name") == name and "dur" in event)
    return [(event["ts"], event["ts"] + event["dur"]) for event in marked]
