"""Every exception that needs no framework, and the sentences they say. Must never import torch or mindspore."""

from __future__ import annotations


class RegrowError(RuntimeError):
    """The root of what regrow raises because a call cannot be replayed as it was.

    On torch these are `regrow.CheckpointError`: this class and torch's own ``torch.utils.checkpoint.CheckpointError``
    at once, so code written for torch keeps catching it. Wrong arguments are ``ValueError``; a handle whose graph has
    died, and a device that wakes up inside forward, are plain ``RuntimeError``.
    """


def released_frame(label: str) -> str:
    """The sentence for a handle whose graph is gone."""
    return (
        f"{label}: the graph of this checkpointed call has died, so there is nothing left to regrow. "
        "Backward already consumed it, or its output was dropped. "
        "Fire a handle before the backward that uses it, and drop handles of finished micro-batches."
    )


def busy_frame(label: str, owner: object, wanted: object) -> str:
    """The sentence for a frame that another session holds."""
    return (
        f"{label}: session {owner!r} is active on this checkpointed call, session {wanted!r} cannot use it meanwhile. "
        f"Nothing was changed. Call clear_recompute_session({owner!r}) first, or use one id for both passes."
    )


def changed_input(label: str, names: list[str], details: list[str]) -> str:
    """The sentence for inputs that moved on between forward and replay."""
    listed = "; ".join(f"{name} ({detail})" for name, detail in zip(names, details, strict=True))
    return (
        f"{label}: cannot replay, an input was changed in place since forward: {listed}. "
        "A replay would start from the new values and give wrong gradients. "
        "Pass a clone, or make the change out of place or after backward."
    )


def changed_value(label: str, index: int) -> str:
    """The sentence for a saved tensor that was overwritten after the replay saved it."""
    return (
        f"{label}: saved tensor {index} was changed in place after an operator saved it for backward, either later in "
        "the function or, if it aliases an input or a parameter, by code that ran since the replay. "
        "Plain autograd refuses a saved tensor that was changed, too. Make that change out of place, or after backward."
    )


def changed_state(label: str, names: list[str], rebound: list[str]) -> str:
    """The sentence for parameters, buffers and captured tensors that moved on between forward and replay."""
    parts = [f"{label}: cannot replay with the values of forward."]
    if names:
        parts.append(
            f"What it reads was changed in place since: {', '.join(names)}. Did an optimiser step, or a write into a "
            "buffer or a captured tensor, come between forward and backward? Make it after backward, or out of place."
        )
    if rebound:
        parts.append(
            f"Names it reads stand for other tensors or modules than in forward: {', '.join(rebound)}. A function sees "
            "the last value of a variable that a loop or later code sets anew. Pass it as an argument instead."
        )
    return " ".join(parts)


def waited(label: str, seconds: float) -> str:
    """The sentence for a replay whose modules another thread's replay does not give back."""
    return (
        f"{label}: waited {seconds:g} s for a replay on another thread that changes the buffers or the mode of the "
        "same module. Does the function wait for a thread that runs backward through its own modules? "
        "Run that backward on the thread of the function."
    )


def suppressed_exception(label: str) -> str:
    """The sentence for a forward context that swallows what forward raised."""
    return (
        f"{label}: the forward context from context_fn suppressed an exception of the checkpointed function, so there "
        "is no output to return. Let the context pass exceptions on."
    )


def device_woke_up(label: str, device_type: str) -> str:
    """The sentence for a device whose first use is inside forward."""
    return (
        f"{label}: the {device_type} device was initialised inside the checkpointed function, so the state of its "
        "random generator before forward is unknown and a replay could draw other numbers. "
        f"Initialise {device_type} before the call, or pass preserve_rng_state=False."
    )
