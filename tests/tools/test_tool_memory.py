"""Reports on memory: what calls, sessions and graphs hold, by storages that are alive, without reading anything."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import regrow
from tests.sessions.conftest import Block

RNG_BYTES = torch.get_rng_state().nbytes


@pytest.fixture
def x():
    return torch.rand(4, 4, dtype=torch.float64).requires_grad_()


def collected(engine, block, x, **options):
    with regrow.recompute_handle_collector_ctx() as handles:
        loss = engine.checkpoint(block, x, **options).sum()
    return loss, handles[0]


def test_a_call_holds_its_input_and_a_generator_state(engine, x):
    """Rule 33: until its graph dies."""
    loss, _ = collected(engine, Block(), x)
    held = regrow.memory_report()
    assert held.bytes_by("kind") == {"input": x.untyped_storage().nbytes(), "generator state": RNG_BYTES}
    del loss, _
    assert regrow.memory_report().rows == []


def test_a_session_holds_what_it_replayed(engine, x):
    """Rule 33: the oracle watches the block's own tensors; weights, saved again, are not the session's."""
    block = Block()
    loss, handle = collected(engine, block, x)
    regrow.recompute_handle(handle, ("micro_batch", 1))
    held = regrow.memory_report()
    assert held.bytes_by("session")["('micro_batch', 1)"] == block.held_bytes == block.held_when_filled
    (row,) = [row for row in held.rows if row.kind == "replayed" and row.held_bytes]
    count = 3 if engine.use_reentrant else 4  # the hooks engine saves the input again
    assert (row.where, row.shape, row.dtype, row.device, row.count) == ("Block", (4, 4), "float64", "cpu", count)
    regrow.clear_recompute_session(("micro_batch", 1))
    assert "replayed" not in regrow.memory_report().bytes_by("kind")
    del loss


def test_storages_count_once(engine):
    """Rule 33: views of one storage, and calls that share their input."""
    x = torch.randn(64, requires_grad=True)

    def views(t):
        y = t * 2
        a, b = y[:32], y[32:]
        return (a * b).sin() + (a * a)

    with regrow.recompute_handle_collector_ctx() as handles:
        losses = [engine.checkpoint(views, x, preserve_rng_state=False).sum() for _ in range(2)]
    for handle in handles:
        regrow.recompute_handle(handle, "s")
    by_kind = regrow.memory_report().bytes_by("kind")
    assert by_kind["input"] == 64 * 4
    assert by_kind["replayed"] == 2 * (64 + 32) * 4
    regrow.clear_recompute_session("s")
    del losses


@pytest.mark.only("hooks", because="the reentrant engine takes no policy")
def test_what_a_policy_keeps_shows_as_kept(engine):
    """Rule 33: it belongs to the call, and a replay that is served it holds nothing more."""
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def function(t):
        return (t @ w).sin().cos()

    loss, handle = collected(
        engine, function, x, policy_fn=lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default
    )
    assert regrow.memory_report().bytes_by("kind")["kept"] == 8 * 8 * 4
    regrow.recompute_handle(handle, "s")
    by_kind = regrow.memory_report().bytes_by("kind")
    assert (by_kind["kept"], by_kind["replayed"]) == (8 * 8 * 4, 8 * 8 * 4)
    regrow.clear_recompute_session("s")
    del loss


def test_modules_are_named_by_their_path(engine, x):
    """Rule 33: as `apply_checkpointing` knows them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU()).double()
    regrow.apply_checkpointing(model, lambda name, _: name in {"0", "1"}, use_reentrant=engine.use_reentrant)
    loss = model(x).sum()
    assert set(regrow.memory_report().bytes_by("where")) == {"0 (Linear.forward)", "1 (GELU.forward)"}
    del loss


def test_a_report_keeps_and_replays_nothing(engine, x, track, gc_off):
    """Rule 32: numbers and words alone."""
    runs = []

    def function(t):
        runs.append(1)
        return track(track(t.sin()).exp()).cos()

    loss, handle = collected(engine, function, x)
    regrow.recompute_handle(handle, "s")
    held = regrow.memory_report(), regrow.saved_tensors_report(loss)
    assert len(runs) == 2
    del loss
    assert track.alive == 0
    assert held[0].total_bytes > 0


def test_a_graph_without_checkpoints_is_what_its_nodes_saved():
    """Rule 33: the oracle is what saved-tensor hooks see."""
    x = torch.randn(16, 16, requires_grad=True)
    layer = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32))
    seen: dict[int, int] = {}
    kept = []

    def pack(tensor):
        seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x).sum()
    found = regrow.saved_tensors_report(layer(x).sum())
    assert found.total_bytes == sum(seen.values())
    leaves = sum(p.nbytes for p in layer.parameters() if p.untyped_storage()._cdata in seen) + x.nbytes
    assert found.bytes_by("kind")["leaf"] == leaves


def test_a_graph_with_checkpoints_holds_inputs_and_what_was_replayed(engine, x):
    """Rule 33: dropped activations do not show, regrown ones do; other nodes are listed next to them."""
    block = Block()
    loss, handle = collected(engine, block, x)
    root = loss.square()
    before = regrow.saved_tensors_report(root)
    assert before.bytes_by("kind") == {"generator state": RNG_BYTES, "input": x.nbytes, "saved": 8}
    regrow.recompute_handle(handle, "s")
    after = regrow.saved_tensors_report(root)
    assert after.bytes_by("kind")["replayed"] == block.held_when_filled
    regrow.clear_recompute_session("s")


def test_a_graph_that_was_used_holds_nothing(x):
    """Rule 33: backward freed it."""
    loss = x.sin().exp().sum()
    assert regrow.saved_tensors_report(loss).total_bytes == 2 * x.nbytes
    loss.backward()
    assert regrow.saved_tensors_report(loss).total_bytes == 0


def test_what_hooks_packed_shows_as_packed(x):
    """Rule 33: values that were moved away are where they are now."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t.clone(), "extra"], lambda packed: packed[0]):
        loss = x.sin().sum()
    assert regrow.saved_tensors_report(loss).bytes_by("kind") == {"packed": x.nbytes}


def test_custom_functions_show_what_they_saved(x):
    """Rule 33: through `save_for_backward`."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t * t)
            return t * t * t

        @staticmethod
        def backward(ctx, grad):
            return grad * 3 * ctx.saved_tensors[0]

    found = regrow.saved_tensors_report(Cube.apply(x).sum())
    assert found.bytes_by("where") == {"CubeBackward": x.nbytes}


def test_several_losses_are_one_graph(x):
    """Rule 33: a node that both reach counts once."""
    y = x.exp()
    assert regrow.saved_tensors_report(y.sum(), y.mean()).total_bytes == x.nbytes


def test_reports_are_tables_and_json(engine, x):
    """Rule 33: largest first, units, the sum at the end."""
    loss, _ = collected(engine, Block(), x)
    held = regrow.memory_report()
    lines = str(held).splitlines()
    assert lines[0].split() == ["held", "by", "as", "session", "shape", "type", "device", "count", "bytes"]
    assert "128 B" in str(held)
    assert lines[-1].split()[0] == "all"
    read = json.loads(held.to_json())
    assert read["total_bytes"] == held.total_bytes == sum(row["held_bytes"] for row in read["rows"])
    del loss


@pytest.mark.parametrize("loss", [3, torch.ones(2), torch.ones(2, requires_grad=True)])
def test_what_has_no_graph_is_refused(loss):
    """Rule 19: there is nothing to look at."""
    with pytest.raises(ValueError, match="loss must be a tensor with a graph"):
        regrow.saved_tensors_report(loss)
