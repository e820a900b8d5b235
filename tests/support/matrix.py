"""One feature, one engine, one cell: a program runs plainly, then through the engine, and what came of it is the cell.

A wrong value or a wrong number of runs is never a cell: it raises.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

import regrow
from tests.conftest import ENGINES, SEED, Engine, assert_same

REENTRANT = {engine.name: engine.use_reentrant for engine in ENGINES}
HOME = Path(regrow.__file__).parent
Cell = dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

_runs = [0]


def tick() -> None:
    """A function under test was entered."""
    _runs[0] += 1


def counted(function: Function) -> Function:
    """The same function, which says when it is entered. Errors call it by a name that no program has."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        tick()
        return function(*args, **kwargs)

    run.__qualname__ = "function"
    return run


class Tick(torch.nn.Module):
    """A layer that says when it is entered: for models that are wrapped, copied and pickled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tick()
        return x


@dataclass(frozen=True)
class Call:
    """How a program calls a function: plainly without an engine, else checkpointed, and counted either way."""

    engine: Engine | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        return self.engine is None

    @property
    def other(self) -> Call:
        """The same through the other engine."""
        return Call(self.engine and next(engine for engine in ENGINES if engine != self.engine), self.options)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.engine is None:
            return counted(function)(*args, **kwargs)
        return self.engine.checkpoint(counted(function), *args, **self.options, **kwargs)

    def bare(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that counts for itself, just as it is."""
        return function(*args) if self.engine is None else self.engine.checkpoint(function, *args, **self.options)

    def apply(self, model: torch.nn.Module, where: Any) -> None:
        """Wrap modules of a model, which count for themselves."""
        if self.engine is not None:
            regrow.apply_checkpointing(model, where, use_reentrant=self.engine.use_reentrant, **self.options)


@dataclass(frozen=True)
class Feature:
    """One row.

    Attributes:
        group: the table it stands in.
        name: what the row says.
        program: runs with any call, and returns a nest that must not depend on it.
        replays: runs of its functions beyond those of the plain call, by engine; None where nothing can count them.
        options: of every checkpointed call.
        no_meaning: why the feature has none, by engine.
        but: what differs from plain autograd on an engine, in words, and what it then returns, given what plain does.
    """

    group: str
    name: str
    program: Callable[[Call], Any]
    replays: Mapping[str, int | None]
    options: Mapping[str, Any]
    no_meaning: Mapping[str, str]
    but: Mapping[str, tuple[str, Callable[[Any], Any]]]


FEATURES: dict[str, Feature] = {}


def feature(
    group: str,
    name: str,
    *,
    replays: int | Mapping[str, int | None] | None = 1,
    options: Mapping[str, Any] | None = None,
    no_meaning: Mapping[str, str] | None = None,
    but: Mapping[str, tuple[str, Callable[[Any], Any]]] | None = None,
) -> Callable[[Function], Function]:
    """Put a program on the list."""

    def add(program: Function) -> Function:
        assert name not in FEATURES, name
        by_engine = replays if isinstance(replays, Mapping) else dict.fromkeys(REENTRANT, replays)
        FEATURES[name] = Feature(group, name, program, by_engine, options or {}, no_meaning or {}, but or {})
        return program

    return add


def try_out(row: Feature, engine: Engine) -> Cell:
    """Run a feature on an engine. What neither works nor is refused raises."""
    if engine.name in row.no_meaning:
        return {"is": "n.a.", "why": row.no_meaning[engine.name]}
    want, runs = _run(row.program, Call())
    try:
        got, more = _run(row.program, Call(engine, row.options))
    except AssertionError:
        raise
    except Exception as error:
        return refusal(error)
    cell: Cell = {"is": "works"}
    if engine.name in row.but:
        cell["but"], differs = row.but[engine.name]
        want = differs(want)
    assert_same(got, want)
    replays = row.replays[engine.name]
    if replays is not None:
        assert more - runs == replays, f"{more - runs} replays where {replays} are stated"
        cell["replays"] = replays
    return cell


def _run(program: Callable[[Call], Any], call: Call) -> tuple[Any, int]:
    torch.manual_seed(SEED)
    _runs[0] = 0
    return program(call), _runs[0]


def refusal(error: Exception) -> Cell:
    """The cell of an error that regrow raised, or that torch did; any other one is raised again."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    path = Path(trace.tb_frame.f_code.co_filename) if trace is not None else Path()
    raised = trace is not None and linecache.getline(str(path), trace.tb_lineno).strip().startswith("raise")
    if HOME in path.parents and raised:
        return refused(f"{type(error).__name__}: {error}")
    if isinstance(error, RuntimeError) and not isinstance(error.__cause__ or error.__context__, Warning):
        return refused(f"{type(error).__name__}: {error}", by="torch")
    raise error


def refused(message: str, by: str = "regrow") -> Cell:
    """The cell of a refusal: the first sentence of it, without addresses and paths."""
    sentence = re.split(r"(?<=[.?!])\s|\n", message.strip(), maxsplit=1)[0]
    sentence = re.sub(r"0x[0-9a-f]+", "0x...", sentence)
    sentence = re.sub(r"/\S*/", "", sentence)
    return {"is": "refused", "by": by, "says": sentence}
