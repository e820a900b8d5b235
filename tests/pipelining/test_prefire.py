"""Prefire: which calls are replayed before backward, in which order, and what they may hold."""

import math

import pytest
import torch

import regrow
from tests.pipelining.conftest import Block, blocks, checkpointed, loss_fn, make_pipeline, plain

pytestmark = pytest.mark.usefixtures("on_each_engine")


def watched(pipeline):
    """What replays in a step: (block, before backward or in it)."""
    seen = []
    for index, block in enumerate(pipeline.blocks):

        def note(index=index):
            if regrow.is_recomputing():
                seen.append((index, "early" if torch._C._current_graph_task_id() == -1 else "late"))

        block.before = note
    return seen


def fired_in_the_loss(full=True, **options):
    """A stage of three blocks and one micro-batch, fired between its forward and its backward."""
    pipeline = make_pipeline(
        "1F1B on the runtime",
        lambda: blocks(3),
        wrap=checkpointed,
        n_microbatches=1,
        loss=lambda output, target: (pipeline.stages[0].prefire(0, full=full), loss_fn(output, target))[1],
        keep="never",
        **options,
    )
    return pipeline


def held_by_a_block():
    """Bytes that the replay of one block holds, beside its parameters, summed from storages."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    block = Block()
    own = {p.untyped_storage()._cdata for p in block.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = block(torch.randn(8, 8, requires_grad=True))
    assert kept is not None
    return sum(size for storage, size in seen.items() if storage not in own)


BUDGETS = {
    "the deepest only": (None, 1),
    "no bound": (math.inf, 3),
    "nothing": (0, 0),
    "two": (2.5, 2),
    "less than one": (0.5, 0),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_full_backward_is_prefired_within_its_budget(same, name):
    """Rule 26: deepest calls first; the others come when backward asks. From the second step sizes are known."""
    budget, count = BUDGETS[name]
    size = held_by_a_block()
    pipeline = fired_in_the_loss(prefire_bytes=None if budget is None else budget * size)
    oracle = plain("1F1B on the runtime", lambda: blocks(3), n_microbatches=1)
    same(pipeline.step(0), oracle.step(0))
    seen = watched(pipeline)
    same(pipeline.step(1), oracle.step(1))
    early = [block for block, when in seen if when == "early"]
    assert early == [2, 1, 0][:count]
    assert [block for block, when in seen if when == "late"] == [2, 1, 0][count:]


def test_firing_twice_replays_once(same):
    """Rule 26: a scheduler may come by again."""
    pipeline = fired_in_the_loss(prefire_bytes=math.inf)
    pipeline.step(0)
    seen = watched(pipeline)
    prefire = pipeline.stages[0].prefire
    pipeline.stages[0].prefire = lambda microbatch, full: [prefire(microbatch, full=full) for _ in range(2)]
    pipeline.step(1)
    assert seen == [(2, "early"), (1, "early"), (0, "early")]


def test_firing_what_is_not_there_does_nothing():
    """Rule 26: a micro-batch without checkpoints, one that was never run, one whose backward is over."""
    pipeline = make_pipeline("1F1B on the runtime", keep="never")
    pipeline.step()
    for microbatch in (0, 99):
        pipeline.stages[0].prefire(microbatch, full=True)


def test_a_prefired_step_that_raises_holds_nothing():
    """Rule 27: what was fired and never read is let go with the step."""
    pipeline = fired_in_the_loss(prefire_bytes=math.inf)
    pipeline.step(0)
    alive = []

    def note():
        if regrow.is_recomputing():
            raise RuntimeError("planned")

    pipeline.blocks[0].before = note
    pipeline.blocks[2].up.register_forward_hook(
        lambda module, args, out: alive.append(torch.multiprocessing.reductions.StorageWeakRef(out.untyped_storage()))
    )
    with pytest.raises(RuntimeError, match="planned"):
        pipeline.step(1)
    assert len(alive) == 2
    assert all(storage.expired() for storage in alive)


@pytest.mark.parametrize("name", ["1F1B", "1F1B on the runtime"])
def test_keep_auto_keeps_what_follows_at_once(name):
    """Rule 26: in 1F1B the last stage runs a micro-batch's backward right after its forward, so nothing is replayed."""
    pipeline = make_pipeline(name, wrap=checkpointed, keep="auto")
    pipeline.step()
    assert [block.runs for block in pipeline.blocks] == [1 + 4] * 2


def test_keep_may_be_a_function():
    """Rule 26: of stage and micro-batch."""
    pipeline = make_pipeline("GPipe", wrap=checkpointed, keep=lambda stage, microbatch: microbatch < 3)
    pipeline.step()
    assert [block.runs for block in pipeline.blocks] == [1 + 4 + 1] * 2
