"""All rows: features with a program of their own, and those that tests of pipelines and of several ranks report."""

from __future__ import annotations

from tests.parallel.four_ranks import PREFIRE
from tests.parallel.four_ranks import SCHEDULES as OF_FOUR_RANKS
from tests.parallel.two_ranks import DDP, MODES, WHERE
from tests.pipelining.conftest import SCHEDULES
from tests.support import calls, kinds, scheduling, selecting, surroundings, transforming
from tests.support.matrix import FEATURES

PROGRAMS = (calls, surroundings, kinds, selecting, scheduling, transforming)  # in the order of the page


def on_a_schedule(name: str) -> str:
    return f"{name}, prefired"


def on_sharded_stages(name: str, prefire: str) -> str:
    return f"FSDP2 inside stages, 2 x 2 ranks, {name}, " + ("lazy" if prefire == "off" else "prefired")


def sharded(where: str, mode: str, *, reshard: bool) -> str:
    when = "resharded after forward" if reshard else "not resharded"
    return f"FSDP2, checkpoint {where} the sharded module, {when}, {MODE[mode]}"


def replicated(option: str) -> str:
    return f"DDP, {OPTION[option]}"


def split(dropout: float) -> str:
    return "tensor parallel layers" + (", dropout" if dropout else "")


MODE = {"lazy": "lazy", "bare": "prefired", "carrier": "prefired in a carrier"}
OPTION = {
    "plain": "as it is",
    "no_sync": "`no_sync`",
    "static_graph": "`static_graph=True`",
    "unused": "`find_unused_parameters=True`",
}
DROPOUT_ON_SHARDS = "dropout on a DTensor that is sharded"

PIPELINES, PARALLEL = "Pipelines: torch's schedules", "Several ranks"
REPORTED = {
    **{on_a_schedule(name): PIPELINES for name in SCHEDULES},
    **{on_sharded_stages(name, prefire): PIPELINES for name in OF_FOUR_RANKS for prefire in PREFIRE},
    **{
        sharded(where, mode, reshard=reshard): PARALLEL
        for where in WHERE
        for reshard in (True, False)
        for mode in MODES
    },
    **{replicated(option): PARALLEL for option in DDP},
    **{split(dropout): PARALLEL for dropout in (0.0, 0.5)},
    DROPOUT_ON_SHARDS: PARALLEL,
}
ROWS = {
    **{
        name: row.group
        for module in PROGRAMS
        for name, row in FEATURES.items()
        if row.program.__module__ == module.__name__
    },
    **REPORTED,
}
