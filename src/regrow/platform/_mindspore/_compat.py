"""Every private MindSpore name, one shim each: why it is needed, and what deletes it. Must never hold state of ours.

A name that is missing, or takes other arguments, is found here, when the platform is chosen, and named with the version
of MindSpore that lacks it. MindSpore is no dependency of regrow, so what comes from it is typed as Any.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from importlib import import_module
from inspect import signature
from typing import Any

_INSTALL = "The MindSpore platform of regrow is made for MindSpore 2.10: pip install 'mindspore==2.10.0' 'numpy<2'."


def _framework() -> Any:
    try:
        return import_module("mindspore")
    except ModuleNotFoundError as error:
        if error.name != "mindspore":
            raise
        raise ImportError(f"MindSpore is not installed. {_INSTALL}") from None


mindspore: Any = _framework()


def _lacking(name: str, why: str) -> ImportError:
    return ImportError(
        f"regrow needs {name} ({why}), which MindSpore {mindspore.__version__} does not have. {_INSTALL}"
    )


def _private(module: str, path: str, why: str, *, takes: tuple[str, ...] | None = None) -> Any:
    """A name of MindSpore, which must take the named arguments if it is a function."""
    shown = f"{module}.{path}" if takes is None else f"{module}.{path}({', '.join(takes)})"
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (AttributeError, ModuleNotFoundError):
        raise _lacking(shown, why) from None
    if takes is not None and not set(takes) <= set(signature(found).parameters):
        raise _lacking(shown, why)
    return found


_RECOMPUTE = "mindspore.common.recompute"

# The public entry. It is looked up in its module to be sure of its arguments.
recompute: Callable[..., Any] = _private(
    _RECOMPUTE,
    "recompute",
    "it runs the function and makes the replays",
    takes=("use_reentrant", "early_stop", "context_fn", "kwargs"),
)

# Collects MindSpore's own record of a call. Deleted by a public collector, or by a handle that recompute returns.
collector_ctx: Callable[[], Any] = _private(
    _RECOMPUTE, "_recompute_handle_collector_ctx", "it gives the record of a call", takes=()
)

# The key under which replays are kept, and whether reads keep. Deleted by a public session.
session_ctx: Callable[[Hashable, bool], Any] = _private(
    _RECOMPUTE, "_recompute_session_ctx", "backwards share a replay in it", takes=("session_id", "retain_on_unpack")
)
clear_session: Callable[[Hashable], None] = _private(
    _RECOMPUTE, "_clear_recompute_session", "it frees what a session holds", takes=("session_id",)
)

# How an early stop passes through the function. Deleted if context_fn learns of it in another way.
Stop: type[BaseException] = _private(_RECOMPUTE, "_StopRecomputationError", "it tells an early stop from an error")

# Whether operators are recorded; the end of the graph that a replay began; which backward runs; its end.
# Deleted by public queries of these, and by a replay that ends its graph when the function raises.
_EXECUTOR = ("mindspore.graph.api", "_pynative_executor")


def _of_executor(name: str, why: str) -> Any:
    return _private(_EXECUTOR[0], f"{_EXECUTOR[1]}.{name}", why)


records: Callable[[], bool] = _of_executor("requires_grad", "it tells whether operators are recorded")
end_empty_graph: Callable[[], None] = _of_executor("end_empty_graph", "a replay that raises leaves its graph open")
backward_id: Callable[[], int] = _of_executor("get_current_autodiff_engine_id", "it tells whether backward runs")
at_backward_end: Callable[[Callable[[], None]], None] = _of_executor(
    "queue_backward_final_callback", "it tells when a backward has ended"
)

# The seeds of operators that do not draw from the generator: all that exist on CPU. Deleted when they do draw from it.
_SEEDS = "mindspore.common.seed"
_seeds: Any = _private(_SEEDS, "__dict__", "it holds the seeds of operators")
op_seeds: dict[Any, int] = _private(_SEEDS, "_KERNEL_SEED", "replays draw forward's random numbers")
_private(_SEEDS, "_GLOBAL_SEED", "replays draw forward's random numbers")


def global_seed() -> int | None:
    """The seed that operators without one of their own derive theirs from; None until ``set_seed``."""
    seed: int | None = _seeds["_GLOBAL_SEED"]
    return seed


def set_global_seed(seed: int | None) -> None:
    """Set it and nothing else, as ``set_seed`` does not: that one seeds numpy and starts the operators anew."""
    _seeds["_GLOBAL_SEED"] = seed


def _check_records() -> None:
    """The record of a call: its methods and its fields are private as well."""
    name = f"{_RECOMPUTE}._RecomputeHandle"
    kind = _private(_RECOMPUTE, "_RecomputeHandle", "it is the record of a call")
    _private(_RECOMPUTE, "_RecomputeHandle.recompute", "it replays a call", takes=("recompute_key",))
    _private(_RECOMPUTE, "_RecomputeHandle.clear_session", "it drops a failed replay", takes=("session_id",))
    record = kind(lambda: None)
    for field in ("placeholders", "placeholder_counter", "recomputed_data", "is_recomputed", "input_node"):
        if not hasattr(record, field):
            raise _lacking(f"{name}.{field}", "it tells how far a replay has come")
    for field in ("_version", "_requires_grad"):
        if not hasattr(mindspore.Tensor, field):
            raise _lacking(f"mindspore.Tensor.{field}", "it tells of changes, and of what backward reaches")


_check_records()
