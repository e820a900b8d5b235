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


def unfinished_forward(label: str) -> str:
    """The sentence for a prefire from inside the function itself."""
    return f"{label}: cannot prefire, its forward has not returned yet."


def foreign_handle(value: object) -> str:
    """The sentence for something that is no handle of this platform."""
    return f"handle must come from recompute_handle_collector_ctx(), got {value!r} of type {type(value).__name__}."


def context_in_context(wanted: object, outer: object) -> str:
    """The sentence for a context inside one of another session."""
    return (
        f"session_id: recompute_session_ctx({wanted!r}) inside recompute_session_ctx({outer!r}); "
        "contexts nest only with the same id. Leave the outer context first."
    )


def prefire_in_context(wanted: object, outer: object) -> str:
    """The sentence for a prefire inside a context of another session."""
    return (
        f"session_id: recompute_handle(..., {wanted!r}) inside recompute_session_ctx({outer!r}). "
        "Prefire inside a context of the same session, or outside any."
    )


def prefire_let_go(wanted: object) -> str:
    """The sentence for a prefire inside a context that does not retain."""
    return (
        f"retain_on_unpack: recompute_handle(..., {wanted!r}) inside a context with retain_on_unpack=False, "
        "which lets values go as they are read. Prefire inside a retaining context, or outside any."
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
        f"{label}: SAVE region {region} wrote into {', '.join(names)}. A replay does not run the region, so what comes "
        "after it would see the old values. Return the new values, or leave the write outside the region."
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


def region_hides(region: str, kind: str, what: str) -> str:
    """The sentence for a region that returns tensors where they cannot be seen."""
    return (
        f"SAVE region {region} returns a {kind} ({what}), which cannot be taken apart to be kept for the replay. "
        "Return a tuple or a dict, or register the class with torch.utils.pytree."
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


def sharded(label: str) -> str:
    """The sentence for a prefire that finds shards where forward had whole parameters. Logged, not raised."""
    return (
        f"{label}: not replayed ahead of backward, since its parameters are sharded until backward gathers them; it is "
        "replayed when backward asks. Checkpoint around the sharded module rather than inside it, or shard with "
        "reshard_after_forward=False."
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


def let_go_frame(label: str) -> str:
    """The sentence for a reentrant call that was released."""
    return (
        f"{label}: this checkpointed call was released, by its backward, by handle.release(), or by a backward that "
        "failed, so it cannot be replayed. Run backward with retain_graph=True if it runs more than once; after an "
        "error, run forward again."
    )


def nested_reentrant(label: str) -> str:
    """The sentence for a reentrant call inside another one."""
    return (
        f"{label}: a checkpoint with use_reentrant=True inside another one with use_reentrant=True. "
        "Leave use_reentrant at False for the inner call, or for both."
    )


def no_output(label: str, kind: str) -> str:
    """The sentence for a reentrant call that returns no tensor."""
    return (
        f"{label}: returned {kind}, which holds no tensor. With use_reentrant=True a checkpointed function must return "
        "a tensor, or a container of tensors that torch's pytree knows. Return one, or leave use_reentrant at False."
    )


def hidden_output(label: str, kind: str) -> str:
    """The sentence for tensors that are returned where nobody finds them."""
    return (
        f"{label}: returned a {kind} with tensors inside, which is no container that torch's pytree knows, so these "
        "tensors would have no gradient. Register it with torch's pytree, return a tuple or dict, "
        "or leave use_reentrant at False."
    )


def captured_graph(label: str, name: str) -> str:
    """The sentence for a captured tensor that has a graph of its own."""
    what = f"captures {name!r}, a tensor that" if name else "captures a tensor that"
    return (
        f"{label}: {what} was computed outside and needs a gradient. With use_reentrant=True backward would run "
        "through the graph outside at the wrong time. Pass it as an argument, or leave use_reentrant at False (for a "
        "weight that functional_call puts in place there is no other way)."
    )


def shared_under_ddp(label: str, name: str) -> str:
    """The sentence for a parameter that DDP would reduce before all of its gradient is there."""
    return (
        f"{label}: parameter {name} of a DistributedDataParallel module is used by another checkpoint with "
        "use_reentrant=True, or outside of them, too. DDP would reduce a part of its gradient. "
        "Pass static_graph=True to DistributedDataParallel, or leave use_reentrant at False."
    )


def leaked_graph(label: str, where: str) -> str:
    """The sentence for a tensor with a graph that is left elsewhere than in the output."""
    return (
        f"{label}: leaves a tensor that needs a gradient in {where}. With use_reentrant=True forward has no graph, so "
        "whoever uses that tensor gets no gradient through it. Return it, or store it detached, or leave use_reentrant "
        "at False."
    )


def buffer_with_grad(label: str, name: str) -> str:
    """The sentence for a buffer that needs a gradient."""
    return (
        f"{label}: reaches the buffer {name}, which needs a gradient. With use_reentrant=True a replay runs on copies "
        "of buffers, so it would get none. Make it a parameter, or leave use_reentrant at False."
    )


def second_order(label: str) -> str:
    """The sentence for a backward that records itself, or is batched."""
    return (
        f"{label}: backward with create_graph=True, or inside a torch.func transform, through a checkpoint with "
        "use_reentrant=True, whose gradients have no graph. Leave use_reentrant at False for second derivatives and "
        "batched gradients."
    )


def limited_backward(label: str, n_captured: int) -> str:
    """The sentence for a limited backward that would accumulate on the side."""
    return (
        f"{label}: autograd.grad() or backward(inputs=...) reached a checkpoint with use_reentrant=True that captures "
        f"{n_captured} {'parameters' if n_captured > 1 else 'parameter'}, whose gradients would be lost or accumulate "
        "although nobody asked. Nothing was changed. Make the call inside "
        "regrow.reentrant_checkpoint_scope(parameters) and set its phase, or run a whole backward(), or leave "
        "use_reentrant at False."
    )


def phase_missing(label: str) -> str:
    """The sentence for a split call whose half of backward was not said."""
    return (
        f"{label}: backward reached a call of a reentrant_checkpoint_scope whose phase was never set. Call "
        'handle.set_phase("dx") before the pass for activations, and handle.set_phase("dw") before the one for '
        "parameters, on every handle of the scope."
    )


def other_count(label: str, forward: int, replay: int) -> str:
    """The sentence for a replay that returns more or fewer tensors than forward did."""
    return (
        f"{label}: forward returned {forward} tensor(s), the replay returned {replay}. "
        "Does the function branch on state that changed since?"
    )


def other_outputs(label: str, different: list[tuple[int, object, object]]) -> str:
    """The sentence for a replay that returns other tensors than forward did."""
    listed = "; ".join(f"output {index}: forward {then}, replay {now}" for index, then, now in different)
    return f"{label}: outputs of the replay differ. {listed}. Does the function branch on state that changed since?"


def other_saved_count(label: str, forward: int, replay: int) -> str:
    """The sentence for a replay that saves more or fewer tensors, where nothing else is known of it."""
    more = " or more" if replay > forward else ""
    return (
        f"{label}: forward saved {forward} tensors, the replay saved {replay}{more}. "
        "Does the function branch on state that changed since forward (a global, a counter, a training flag), "
        "or catch every Exception?"
    )


def read_twice(session_id: object) -> str:
    """The sentence for a value that was asked for again after it was let go."""
    return (
        f"session {session_id!r}: a saved tensor was read twice inside one recompute_session_ctx({session_id!r}, "
        "retain_on_unpack=False), which lets values go as they are read. Open the context with retain_on_unpack=True "
        "for all passes but the last, or anew for each pass."
    )


def mindspore_lacks(asked: str, why: str, instead: str) -> str:
    """The sentence for what the MindSpore platform cannot do, with another way."""
    return f"{asked}: not on MindSpore: {why}. {instead}"


def unrepeatable_cells(label: str, names: list[str]) -> str:
    """The sentence for cells whose random numbers a replay on CPU could not draw again."""
    return (
        f"{label}: {', '.join(names)} in training: on CPU MindSpore keeps the state of these random numbers inside the "
        "kernel, where nothing can rewind it, so a replay would draw others and give wrong gradients. "
        "Call mindspore.ops.dropout in the function instead, or leave the cell outside of the checkpointed call. "
        "If the function reaches the cell but does not run it, pass preserve_rng_state=False."
    )
