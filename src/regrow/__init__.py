"""regrow: activation recomputation that a scheduler can control.

Names are looked up when they are first used, so importing regrow imports no framework.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "regrow._core.faults",
    "FrameBusyError": "regrow._core.faults",
    "Handle": "regrow._core.frame",
    "InputChangedError": "regrow._core.faults",
    "PlaceholderError": "regrow._core.faults",
    "RegionError": "regrow._core.faults",
    "ReentrantHandle": "regrow._core.scope",
    "RegrowError": "regrow.errors",
    "ReplayMismatchError": "regrow._core.faults",
    "StateChangedError": "regrow._core.faults",
    "ValueChangedError": "regrow._core.faults",
    "apply_checkpointing": "regrow.wrappers",
    "checkpoint": "regrow.call",
    "checkpoint_exclude_wrapper": "regrow.wrappers",
    "checkpoint_wrapper": "regrow.wrappers",
    "clear_recompute_session": "regrow.scheduling",
    "create_selective_checkpoint_contexts": "regrow._core.selective",
    "is_recomputing": "regrow._core.replaying",
    "ledger": "regrow.trace.ledger",
    "memory_report": "regrow.trace.holdings",
    "policies": "regrow.policies",
    "recompute_handle": "regrow.scheduling",
    "recompute_handle_collector_ctx": "regrow.scheduling",
    "recompute_session_ctx": "regrow.scheduling",
    "reentrant_checkpoint_scope": "regrow.scheduling",
    "register_ambient": "regrow._core.ambient",
    "saved_tensors_report": "regrow.trace.graph",
    "save_region": "regrow.wrappers",
    "trace": "regrow.trace",
}

__all__ = list(_HOMES)


def __getattr__(name):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'regrow' has no attribute {name!r}")
    module = import_module(home)
    found = globals()[name] = module if home == f"{__name__}.{name}" else getattr(module, name)
    return found


def __dir__():
    return sorted({*globals(), *_HOMES})
