"""Checks of regrow on an accelerator: one script, a few minutes, needs this source tree and torch. CPU runs it, too.

    python tools/gpu_check.py                        # the accelerator that torch finds, else the CPU
    python tools/gpu_check.py --device cpu --quick   # everything that means something there, in seconds
    python tools/gpu_check.py --out found.json       # what was found, and on what, as JSON

The oracle is plain autograd on the same device, bit for bit. Replays are counted in the function that is checkpointed,
bytes by torch's allocator. Exit status: 0 all is right, 1 something is not or did not get its turn, 2 regrow does not
run with this torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products repeat bit for bit, whatever stream they run on

import torch

try:
    import regrow
    from accelerator_checks import CHECKS
    from subject import Found, MeaninglessError, Setting
except ImportError as error:
    print(error)
    sys.exit(2)

LIMIT_S = 480.0
Check = Callable[[Setting], Found]


@dataclass
class Result:
    """What became of one check: ok, wrong, n.a. or not run."""

    check: str
    outcome: str
    seconds: float = 0.0
    why: str = ""
    found: Found = field(default_factory=dict)


def results(setting: Setting, checks: dict[str, Check], limit_s: float) -> Iterator[Result]:
    """Make one check after the other; what is left at the limit is not run."""
    began = time.monotonic()
    for name, check in checks.items():
        start = time.monotonic()
        if start - began > limit_s:
            yield Result(name, "not run", why=f"the limit of {limit_s:.0f} s had passed")
            continue
        try:
            result = Result(name, "ok", found=check(setting))
        except MeaninglessError as error:
            result = Result(name, "n.a.", why=str(error))
        except Exception as error:
            result = Result(name, "wrong", why=f"{type(error).__name__}: {error}")
        result.seconds = round(time.monotonic() - start, 1)
        yield result


def machine(setting: Setting) -> dict[str, str]:
    """What the checks ran on."""
    device = platform.processor() or platform.machine() if setting.on_cpu else setting.module.get_device_name()
    return {
        "regrow": regrow.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{setting.device.type}: {device}",
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, and say what became of each."""
    options = parsed(arguments)
    found = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(options.device or (found.type if found is not None else "cpu"))
    if device.index is not None:
        torch.get_device_module(device.type).set_device(device)  # all that asks for the current one
    setting = Setting(device, options.quick)
    where = machine(setting)
    print(", ".join(f"{key} {value}" for key, value in where.items()), flush=True)
    made = []
    for result in results(setting, CHECKS, options.limit_s):
        print(f"{result.outcome:8}{result.check:17}{result.seconds:6.1f} s  {result.why or result.found}", flush=True)
        made.append(result)
    if options.out is not None:
        report = {"machine": where, "quick": options.quick, "results": [asdict(result) for result in made]}
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(any(result.outcome in ("wrong", "not run") for result in made))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line: no more is at hand on a bare machine than Python and torch."""
    parser = argparse.ArgumentParser(description="Check regrow on an accelerator.")
    parser.add_argument("--device", help="cuda, npu, xpu, cpu, ...: what torch finds, if it is not said")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="what was found, as JSON")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="no check begins after this many seconds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    sys.exit(main())
