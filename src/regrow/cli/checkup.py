"""The checkup: what this installation has, asked one by one. Must never import more than it asks about."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any

import torch

from regrow import __version__
from regrow.cli.counts import counted

_EXTRAS = ("numpy", "typer", "rich", "matplotlib")


@dataclass(slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        good: False where it is missing or broken.
    """

    name: str
    value: str
    good: bool = True


@dataclass(slots=True)
class Checkup:
    """Everything that was found, by section.

    Attributes:
        internals: the private names of torch, and what each is for.
    """

    sections: dict[str, list[Finding]] = field(default_factory=dict)
    internals: dict[str, str] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether checkpoints work on every device that is here."""
        return all(finding.good for finding in self.sections["checked against plain autograd"])

    def text(self) -> str:
        """Lines to read."""
        width = max(len(finding.name) for findings in self.sections.values() for finding in findings)
        lines: list[str] = []
        for title, findings in self.sections.items():
            lines += ["", title] if lines else [title]
            lines += [f"  {finding.name.ljust(width)}  {finding.value}" for finding in findings]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The same for programs."""
        sections = {
            title: {finding.name: {"value": finding.value, "good": finding.good} for finding in findings}
            for title, findings in self.sections.items()
        }
        return json.dumps(
            {"version": 1, "works": self.works, "sections": sections, "internals": self.internals}, indent=1
        )


def run(*, as_json: bool) -> int:
    """Look, and print.

    Returns:
        The exit status: 1 if checkpoints do not work on a device that is here.
    """
    found = look()
    sys.stdout.write((found.to_json() if as_json else found.text()) + "\n")
    return 0 if found.works else 1


def look() -> Checkup:
    """Look at everything."""
    found = Checkup()
    found.sections["versions"] = list(_versions())
    found.sections["devices"] = list(_devices())
    found.sections["torch internals"] = list(_internals(found.internals))
    found.sections["available"] = list(_available())
    found.sections["checked against plain autograd"] = [_tried(kind) for kind in _kinds()]
    return found


def _versions() -> Iterator[Finding]:
    yield Finding("regrow", __version__)
    yield Finding("python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield Finding("system", platform.platform())
    yield Finding("torch", f"{torch.__version__} ({_declared()})")
    for name in ("cuda", "hip", "xpu"):
        built = getattr(torch.version, name, None)
        if built is not None:
            yield Finding(f"torch for {name}", str(built))
    yield from map(_version, _EXTRAS)


def _version(name: str) -> Finding:
    try:
        return Finding(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "not installed", good=False)


def _declared() -> str:
    try:
        wanted = metadata.requires("regrow") or []
    except metadata.PackageNotFoundError:
        return "regrow runs from its sources, not installed"
    return "regrow declares " + next((each for each in wanted if each.startswith("torch")), "none")


def _devices() -> Iterator[Finding]:
    yield Finding(
        "cpu", f"{counted(os.cpu_count() or 1, 'core')}, torch uses {counted(torch.get_num_threads(), 'thread')}"
    )
    for kind in _kinds()[1:]:
        module = torch.get_device_module(kind)
        for index in range(torch.accelerator.device_count()):
            named = getattr(module, "get_device_name", None)
            yield Finding(f"{kind}:{index}", str(named(index)) if named is not None else "present")


def _internals(names: dict[str, str]) -> Iterator[Finding]:
    """The private names behind each part; the first that is missing ends it."""
    for part, home in (("checkpoints", "regrow._core.compat"), ("pipelines", "regrow.pipelining._compat")):
        yield _attempt(part, lambda home=home: import_module(home), "all found")  # type: ignore[misc]
    private = sys.modules.get("regrow._core.private")
    names.update({} if private is None else private.internals)
    yield Finding("in use", counted(len(names), "private name"))


def _available() -> Iterator[Finding]:
    yield _importable("checkpoint, sessions, tools", "regrow.call")
    yield _importable("pipelines", "regrow.pipelining")
    yield _attempt("use_reentrant=True", lambda: _regrown(torch.device("cpu"), use_reentrant=True))
    yield Finding("torch.compile, export", "a call is torch's own checkpoint while they trace, without handles")
    distributed = torch.distributed.is_available()
    backends = [name for name in ("gloo", "nccl", "xccl", "mpi") if distributed and _has_backend(name)]
    yield Finding("messages between ranks", ", ".join(backends) or "none", good=bool(backends))
    yield _importable("regrow trace show", "matplotlib")


def _importable(name: str, module: str) -> Finding:
    return _attempt(name, lambda: import_module(module))


def _attempt(name: str, work: Callable[[], Any], good: str = "yes") -> Finding:
    try:
        work()
    except Exception as error:
        return Finding(name, f"no: {str(error).splitlines()[0] if str(error) else type(error).__name__}", good=False)
    return Finding(name, good)


def _has_backend(name: str) -> bool:
    return bool(getattr(torch.distributed, f"is_{name}_available", bool)())


def _kinds() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", *([] if accelerator is None else [accelerator.type])]


def _tried(kind: str) -> Finding:
    def compare() -> None:
        device = torch.device(kind)
        plain, regrown = _gradient(device, lambda function, x: function(x)), _regrown(device)
        if not torch.equal(plain, regrown):
            raise ValueError("gradients differ")

    return _attempt(kind, compare, "the same, bit for bit")


def _regrown(device: torch.device, **options: Any) -> torch.Tensor:
    checkpoint = import_module("regrow.call").checkpoint
    return _gradient(device, lambda function, x: checkpoint(function, x, **options))


def _gradient(device: torch.device, call: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The gradient of a small function with random numbers in it, which are the same for the same seed."""
    x = torch.linspace(-1, 1, 64, device=device).reshape(8, 8).requires_grad_()
    with torch.random.fork_rng(device_type=device.type if device.type != "cpu" else "cuda", enabled=True):
        torch.manual_seed(0)
        out = call(lambda t: torch.dropout(torch.sin(t @ t).relu(), 0.5, True).exp(), x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
    return gradient
