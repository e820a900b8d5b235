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


def scheduled_while_compiling(verb: str) -> str:
    """The sentence for a scheduling verb where calls leave no handles."""
    return (
        f"{verb} inside a function that torch.compile compiles: checkpointed calls there are torch's own, which leave "
        "no handles and belong to no session. Call it in eager code around what is compiled, compile the checkpointed "
        "modules instead, or mark the function that schedules with torch.compiler.disable."
    )


def changed_input(label: str, names: list[str], details: list[str]) -> str:
    """The sentence for inputs that moved on between forward and replay."""
    listed = "; ".join(f"{name} ({detail})" for name, detail in zip(names, details, strict=True))
    return (
        f"{label}: cannot replay, an input was changed in place since forward: {listed}. "
        "A replay would start from the new values and give wrong gradients. "
        "Pass a clone, or make the change out of place or after backward."
    )


def changed_value(label: str, index: int | None) -> str:
    """The sentence for a saved tensor that was overwritten after the replay, or a SAVE region, saved it."""
    which = "a tensor that a SAVE region kept" if index is None else f"saved tensor {index}"
    return (
        f"{label}: {which} was changed in place after an operator saved it for backward, either later in "
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


def misused_placeholder(region: str, operator: str) -> str:
    """The sentence for reading an output that a SAVE region was told not to keep."""
    return (
        f"{operator} reads the output of SAVE region {region}, which save_output=False does not keep for the replay. "
        "Such an output may only be viewed and passed to another SAVE region. Leave save_output at True, "
        "or move the operator into a region."
    )


def region_wrote(label: str, region: str, names: list[str]) -> str:
    """The sentence for a SAVE region that writes into what it is given."""
    return (
        f"{label}: SAVE region {region} wrote in place into {', '.join(names)}. A replay does not run the region, so "
        "what comes after it would see the old values. Return the new values, or leave the write outside the region."
    )


def region_output_written(label: str, region: str) -> str:
    """The sentence for a region's output that is overwritten although replays need it as it was."""
    return (
        f"{label}: an output of SAVE region {region} was changed in place after the region, and a replay needs it as "
        "the region made it. Make that change out of place, or inside the region."
    )


def region_raised(label: str, region: str, error: str) -> str:
    """The sentence for a region whose error the function caught, so that forward went on."""
    return (
        f"{label}: SAVE region {region} raised {error} and the function went on. A replay does not run the region, so "
        "it cannot go the same way. Catch the error inside the region, or leave it no SAVE region."
    )


def region_elsewhere(label: str, region: str, found: str) -> str:
    """The sentence for a replay that reaches regions in another order, number or place than forward did."""
    return (
        f"{label}: the replay reached SAVE region {region} where {found}. "
        "Does the function branch on state that changed since forward?"
    )


def regions_left(label: str, region: str, left: int) -> str:
    """The sentence for a replay that ends before it has reached every region."""
    return (
        f"{label}: the replay ended with {left} SAVE regions of forward not reached, the first of them {region}. "
        "Does the function branch on state that changed since forward?"
    )


def region_input_differs(label: str, region: str, name: str, forward: str, replay: str) -> str:
    """The sentence for an input of a region that looks otherwise than in forward."""
    return (
        f"{label}: {name} of SAVE region {region} is {replay} in the replay and was {forward} in forward. "
        "Does the function branch on state that changed since forward?"
    )


def region_hides(region: str, kind: str, names: list[str]) -> str:
    """The sentence for a region that returns tensors where they cannot be seen."""
    return (
        f"SAVE region {region} returns a {kind} with tensors in {', '.join(names)}, which cannot be taken apart "
        "to keep them. Return a tuple or a dict, or register the class with torch.utils.pytree."
    )


def region_gradient(label: str, region: str) -> str:
    """The sentence for a gradient through a region that the checkpointed function computes itself."""
    return (
        f"{label}: the checkpointed function computes a gradient through SAVE region {region}, which a replay does not "
        "run. Compute that gradient inside the region, or leave the function no SAVE region."
    )


def region_transformed(label: str, region: str) -> str:
    """The sentence for a region under a torch.func transform."""
    return (
        f"{label}: SAVE region {region} is called under a torch.func transform such as vmap or grad, whose tensors "
        "cannot be kept. Put the transform inside the region."
    )


def region_foreign_contexts(label: str, region: str) -> str:
    """The sentence for a region among the operators that torch's own selective contexts count."""
    return (
        f"{label}: SAVE region {region} is called under torch's own selective contexts, which expect its operators in "
        "the replay. Use policy_fn, or regrow.create_selective_checkpoint_contexts."
    )


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
