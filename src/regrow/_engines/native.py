"""Under torch.compile and export: torch's own checkpoint, which tracers know. Must never log: that breaks a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.utils.checkpoint

from regrow._core.selective import create_selective_checkpoint_contexts
from regrow.policies import Policy


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    """Call torch's non-reentrant checkpoint with regrow's options in torch's words."""
    context_fn, policy_fn = options.pop("context_fn"), options.pop("policy_fn")
    options.pop("respect_saved_tensors_hooks")  # what a policy keeps is decided by the compiler there
    options["debug"] = False  # both runs come of one trace, and torch refuses to log them
    if isinstance(context_fn, partial) and context_fn.func is create_selective_checkpoint_contexts:
        # Tracers know torch's contexts: those tell the compiler what to keep.
        context_fn = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, *context_fn.args)
    if isinstance(policy_fn, Policy):
        context_fn = policy_fn.context_fn
    elif policy_fn is not None:
        context_fn = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy_fn)
    if context_fn is not None:
        options["context_fn"] = context_fn
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
