"""The ledger: its counts are the runs of the user's functions, its bytes those of the storages that are alive."""

from __future__ import annotations

import gc
import io
import json
import logging
import threading

import pytest
import torch

import regrow
from regrow._core import events
from tests.pipelining.conftest import make_pipeline
from tests.sessions.conftest import Block, Started

MIB = 1 << 20


@pytest.fixture
def x():
    return torch.rand(4, 4, dtype=torch.float64).requires_grad_()


def peak_of(engine):
    """Bytes of a replay that serves one whole backward: the reentrant engine's also has the output, for it runs on."""
    return Block.held_when_filled + (4 * 4 * 8 if engine.use_reentrant else 0)


def collected(engine, block, x):
    with regrow.recompute_handle_collector_ctx() as handles:
        loss = engine.checkpoint(block, x).sum()
    return loss, handles[0]


def test_a_plain_backward_is_one_lazy_replay(engine, x):
    """Rule 33: the oracle is the block's own count."""
    block = Block()
    with regrow.ledger() as ledger:
        engine.checkpoint(block, x).sum().backward()
    assert (ledger.total.forwards, ledger.total.replays, ledger.total.lazy) == (1, block.replays, 1)
    assert ledger.warnings == []


@pytest.mark.only("hooks", because="the reentrant engine refuses it")
def test_a_backward_in_pieces_without_a_session_is_counted_and_warned_of(engine, x, caplog):
    """Rule 33: one replay for each piece, as the block itself counts."""
    block = Block()
    with caplog.at_level(logging.WARNING, "regrow.trace"), regrow.ledger() as ledger:
        loss = engine.checkpoint(block, x).sum()
        for leaf in (x, *block.weights):
            torch.autograd.grad(loss, leaf, retain_graph=True)
        del loss
    assert ledger.total.replays == block.replays == 3
    assert ledger.warnings == ["Block was replayed 3 times for one call: is backward split without a session?"]
    assert caplog.messages == ledger.warnings


def test_one_function_is_warned_of_once(engine, x):
    """Rule 33: a training of many steps says it in one line."""
    with regrow.ledger() as ledger:
        for _ in range(3):
            loss = engine.checkpoint(torch.sin, x).sum()
            for _ in range(2):
                torch.autograd.grad(loss, x, retain_graph=True)
            del loss
    assert len(ledger.warnings) == 1


def test_a_prefire_that_backward_finds_is_in_time(engine, x):
    """Rule 33: fired, read by two passes, replayed once in all."""
    block = Block()
    with regrow.ledger() as ledger:
        loss, handle = collected(engine, block, x)
        regrow.recompute_handle(handle, "s")
        regrow.recompute_handle(handle, "s")
        for retain in (True, False):
            with regrow.recompute_session_ctx("s", retain_on_unpack=retain):
                torch.autograd.grad(loss, x, retain_graph=True)
        regrow.clear_recompute_session("s")
    total = ledger.total
    assert (total.replays, total.prefired, total.in_time, total.late, total.wasted) == (block.replays, 1, 1, 0, 0)
    assert ledger.warnings == []


@pytest.mark.parametrize("ending", ["clear", "drop"])
def test_a_prefire_that_nobody_reads_is_wasted(engine, x, ending):
    """Rule 33: cleared, or its graph dropped."""
    block = Block()
    with regrow.ledger() as ledger:
        loss, handle = collected(engine, block, x)
        regrow.recompute_handle(handle, "s")
        if ending == "clear":
            regrow.clear_recompute_session("s")
        del loss
        regrow.clear_recompute_session("s")
    assert (ledger.total.prefired, ledger.total.wasted, ledger.total.in_time) == (1, 1, 0)


def test_a_prefire_that_backward_waits_for_is_late(engine, x):
    """Rule 33: backward came while it ran, on another thread."""
    block = Block()
    reached, go_on = threading.Event(), threading.Event()

    def halfway(runs: int) -> None:
        if runs == 2:
            reached.set()
            assert go_on.wait(30)

    block.halfway = halfway
    with regrow.ledger() as ledger:
        loss, handle = collected(engine, block, x)
        prefire = Started(lambda: regrow.recompute_handle(handle, "s"))
        assert reached.wait(30)

        def backward() -> None:
            with regrow.recompute_session_ctx("s", retain_on_unpack=True):
                torch.autograd.grad(loss, x, retain_graph=True)

        reading = Started(backward)
        (row,) = [row for row in ledger.calls if row.label == "Block"]
        frame = handle._frame()
        while not any(replay.record.asked_ns for replay in frame.replays.values()):
            assert reading._thread.is_alive()
        go_on.set()
        prefire.result()
        reading.result()
        regrow.clear_recompute_session("s")
        del frame
    assert block.replays == 1
    assert (row.account.prefired, row.account.late, row.account.in_time) == (1, 1, 0)


def test_a_prefire_after_backward_had_replayed_is_late(engine, x):
    """Rule 33: it does nothing any more."""
    block = Block()
    with regrow.ledger() as ledger, regrow.recompute_session_ctx("s", retain_on_unpack=True):
        loss, handle = collected(engine, block, x)
        torch.autograd.grad(loss, x, retain_graph=True)
        regrow.recompute_handle(handle, "s")
        regrow.clear_recompute_session("s")
    assert (ledger.total.lazy, ledger.total.prefired, ledger.total.late) == (1, 0, 1)
    assert block.replays == 1


def test_bytes_are_those_of_the_storages_that_are_alive(engine, x):
    """Rule 33: the oracle watches the block's own tensors, weakly; inputs and weights are not the replay's."""
    block = Block()
    with regrow.ledger() as ledger:
        loss, handle = collected(engine, block, x)
        assert ledger.total.held_bytes == block.held_bytes == 0
        regrow.recompute_handle(handle, "s")
        assert ledger.total.held_bytes == block.held_bytes == block.held_when_filled
        with regrow.recompute_session_ctx("s", retain_on_unpack=True):
            torch.autograd.grad(loss, x, retain_graph=True)
        assert ledger.total.held_bytes == block.held_bytes == block.held_when_filled
        (session,) = ledger.sessions
        assert (session.name, session.account.held_bytes) == ("s", block.held_when_filled)
        regrow.clear_recompute_session("s")
        assert ledger.total.held_bytes == block.held_bytes == 0
    assert ledger.total.peak_bytes == block.held_when_filled


@pytest.mark.parametrize("retain_graph", [False, True])
def test_the_peak_of_a_plain_backward_is_one_call_at_a_time(engine, x, retain_graph):
    """Rule 33: each call's values are gone when the next is replayed, whether nodes die or only let go."""
    blocks = [Block(seed=seed) for seed in range(4)]
    most = []
    for block in blocks:
        block.halfway = lambda runs: most.append(sum(each.held_bytes for each in blocks))
    with regrow.ledger() as ledger:
        y = x
        for block in blocks:
            y = engine.checkpoint(block, y)
        y.sum().backward(retain_graph=retain_graph)
    assert ledger.total.peak_bytes == peak_of(engine)
    assert max(most) <= Block.held_when_filled


def test_the_peak_of_a_session_is_all_that_it_holds(engine, x):
    """Rule 33: prefired together, held together."""
    blocks = [Block(seed=seed) for seed in range(3)]
    with regrow.ledger() as ledger:
        with regrow.recompute_handle_collector_ctx() as handles:
            y = x
            for block in blocks:
                y = engine.checkpoint(block, y)
        for handle in handles:
            regrow.recompute_handle(handle, "s")
        assert ledger.total.held_bytes == sum(block.held_bytes for block in blocks) == 3 * Block.held_when_filled
        with regrow.recompute_session_ctx("s"):
            y.sum().backward()
        regrow.clear_recompute_session("s")
    assert ledger.total.peak_bytes == 3 * Block.held_when_filled
    assert ledger.total.in_time == 3


def told(**fields):
    """A replay of call 1 for a session."""
    usual = {
        "call": 1,
        "label": "block",
        "replay": 1,
        "session": "s",
        "prefired": True,
        "failed": False,
        "began_ns": 0,
        "ended_ns": 10**9,
        "held_bytes": 4 * MIB,
        "thread": 0,
        "shrunk": (),
    }
    return events.Replayed(**{**usual, **fields})


def test_byte_seconds_are_bytes_times_time():
    """Rule 33: 4 MiB for 2 s and 8 MiB for 1 s; the times are those of the events."""
    second = 10**9
    with regrow.ledger() as ledger:
        events.emit(told())
        events.emit(told(call=2, replay=2, began_ns=2 * second, ended_ns=3 * second))
        for replay in (1, 2):
            events.emit(
                events.Released(
                    call=replay,
                    label="block",
                    replay=replay,
                    session="s",
                    prefired=True,
                    reason="cleared",
                    at_ns=4 * second,
                    left_bytes=0,
                    passes=1,
                    late=False,
                )
            )
        assert ledger.total.byte_s == 16 * MIB
        assert ledger.total.replay_s == 2
        assert [row.account.byte_s for row in ledger.calls] == [12 * MIB, 4 * MIB]


def test_what_reads_let_go_is_told_with_the_next_replay():
    """Rule 33: a replay counts in full until somebody looks again."""
    with regrow.ledger() as ledger:
        events.emit(told())
        events.emit(told(call=2, replay=2, held_bytes=MIB, ended_ns=2 * 10**9, shrunk=((1, MIB),)))
        assert (ledger.total.held_bytes, ledger.total.peak_bytes) == (2 * MIB, 4 * MIB)


@pytest.mark.only("hooks", because="reentrant calls do not nest")
def test_nested_calls_are_counted_as_their_functions_run(engine, x):
    """Rules 15 and 33: forwards and replays of a function are its runs, whatever made them."""
    inner = [Block(seed=1), Block(seed=2)]
    runs = []

    def outer(t):
        runs.append(1)
        return engine.checkpoint(inner[1], engine.checkpoint(inner[0], t)).sin()

    with regrow.ledger() as ledger:
        engine.checkpoint(outer, x).sum().backward()
    by_label = ledger.labels
    (outer_label,) = [label for label in by_label if label != "Block"]
    blocks, around = by_label["Block"], by_label[outer_label]
    assert blocks.forwards + blocks.replays == inner[0].runs + inner[1].runs
    assert around.forwards + around.replays == len(runs)


@pytest.mark.only("hooks", because="a failed backward lets a reentrant call go")
def test_a_replay_that_fails_is_counted_and_holds_nothing(engine, x):
    """Rules 11 and 33: the next one starts anew."""
    block, fail = Block(), [True]

    def halfway(runs: int) -> None:
        if runs == 2 and fail:
            raise ZeroDivisionError

    block.halfway = halfway
    with regrow.ledger() as ledger:
        loss = engine.checkpoint(block, x).sum()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        assert ledger.total.held_bytes == 0
        fail.clear()
        loss.backward()
    assert (ledger.total.replays, ledger.total.failed) == (2, 1)
    assert block.replays == 2
    assert ledger.warnings == []


def test_a_session_that_is_never_cleared_is_warned_of_with_its_line(engine, x):
    """Rule 33: its graph died, and nobody cleared it."""
    with regrow.ledger() as ledger:
        loss, handle = collected(engine, Block(), x)
        regrow.recompute_handle(handle, ("micro_batch", 3))
        del loss
    (warning,) = ledger.warnings
    assert warning.startswith("session ('micro_batch', 3) went away without clear_recompute_session.")
    assert "test_tool_ledger.py:" in warning
    assert warning.endswith("in test_a_session_that_is_never_cleared_is_warned_of_with_its_line.")


def test_a_session_that_is_used_anew_without_clear_is_warned_of_at_once(engine, x):
    """Rule 33: not only when the ledger is left."""
    with regrow.ledger() as ledger:
        for _ in range(2):
            loss, handle = collected(engine, Block(), x)
            regrow.recompute_handle(handle, "s")
            del loss
        assert len(ledger.warnings) == 1
        regrow.clear_recompute_session("s")
    assert len(ledger.warnings) == 1


def test_clearing_after_the_last_pass_took_everything_is_clearing(engine, x):
    """Rule 33: the session is gone when dw has freed the graph; the clear that follows is what it should be."""
    with regrow.ledger() as ledger:
        for _ in range(3):
            loss, handle = collected(engine, Block(), x)
            regrow.recompute_handle(handle, "s")
            with regrow.recompute_session_ctx("s"):
                loss.backward()
            del loss
            regrow.clear_recompute_session("s")
    assert ledger.warnings == []


def test_calls_have_an_index_by_function(engine, x):
    """Rule 33: the second call of a block is its second micro-batch."""
    with regrow.ledger() as ledger:
        for _ in range(2):
            for function in (torch.sin, torch.cos):
                engine.checkpoint(function, x)
    found = [(row.label.split(".")[-1], row.index) for row in ledger.calls]
    assert found == [("sin", 0), ("cos", 0), ("sin", 1), ("cos", 1)]


def test_rows_are_bounded_and_sums_are_not(engine, x):
    """Rule 12: a ledger that stays open does not grow with the steps."""
    with regrow.ledger(keep=3) as ledger:
        for step in range(10):
            with regrow.recompute_session_ctx(step, retain_on_unpack=True):
                engine.checkpoint(torch.sin, x).sum().backward()
            regrow.clear_recompute_session(step)
    assert (len(ledger.calls), len(ledger.sessions)) == (3, 3)
    assert [row.index for row in ledger.calls] == [7, 8, 9]
    assert ledger.total.replays == 10


def test_a_ledger_keeps_no_call_alive(engine, x, track, gc_off):
    """Rule 32: what it has counted dies as if nobody had counted."""
    with regrow.ledger() as ledger:
        loss = engine.checkpoint(lambda t: track(track(t.sin()).exp()).cos(), x).sum()
        loss.backward(retain_graph=True)
        assert ledger.calls[0].alive
        assert track.alive == 0
        del loss
        assert not ledger.calls[0].alive
        gc.collect()


def test_two_ledgers_hear_the_same(engine, x):
    """Rule 33: one may be opened inside the other."""
    with regrow.ledger() as outer:
        engine.checkpoint(torch.sin, x).sum().backward()
        with regrow.ledger() as inner:
            engine.checkpoint(torch.sin, x).sum().backward()
    assert (outer.total.replays, inner.total.replays) == (2, 1)


def test_threads_are_counted_together(engine):
    """Rule 33: events come from several threads at once."""
    block = [Block(seed=seed) for seed in range(4)]

    def train(index: int) -> None:
        for _ in range(25):
            leaf = torch.rand(4, 4, dtype=torch.float64).requires_grad_()
            engine.checkpoint(block[index], leaf).sum().backward()

    with regrow.ledger() as ledger:
        started = [Started(lambda index=index: train(index)) for index in range(4)]
        for each in started:
            each.result()
    total = ledger.total
    assert total.forwards + total.replays == sum(each.runs for each in block) == 200
    assert total.held_bytes == 0


@pytest.mark.parametrize(("retention", "n"), [("all", 1), ("needed", 1), ("none", 2)])
def test_a_pipeline_is_counted_as_its_blocks_count_themselves(one_rank, retention, n):
    """Rules 26 and 33: every block and micro-batch; nothing is left, nothing goes away uncleared."""
    pipeline = make_pipeline(
        "InterleavedZeroBubble",
        wrap=lambda module: regrow.apply_checkpointing(module, lambda name, _: name in {"0", "1"}) and module,
        retention=retention,
        keep="never",
    )
    pipeline.step()
    runs = sum(block.runs for block in pipeline.blocks)
    with regrow.ledger() as ledger:
        pipeline.step()
    total = ledger.total
    assert total.forwards + total.replays == sum(block.runs for block in pipeline.blocks) - runs
    assert {row.account.replays for row in ledger.calls[: total.forwards]} <= {1, n}
    assert total.held_bytes == 0
    assert total.wasted == 0
    assert all(row.cleared for row in ledger.sessions)
    assert {row.name for row in ledger.sessions} >= {"<stage 0, micro-batch 0>", "<stage 1, micro-batch 3>"}


def test_the_summary_is_a_table_with_units(engine, x):
    """Rule 33: one line for each function, one for all, and the warnings."""
    with regrow.ledger() as ledger:
        loss, handle = collected(engine, Block(), x)
        regrow.recompute_handle(handle, "s")
        out = io.StringIO()
        ledger.summary(out)
        del loss
    lines = out.getvalue().splitlines()
    assert lines[0].split()[:5] == ["calls", "replays", "lazy", "in", "time"]
    assert lines[2].split()[:3] == ["Block", "1", "1"]
    assert "384 B" in lines[2]
    assert lines[-1].startswith("s ")
    assert "384 B" in lines[-1]


def test_the_summary_goes_to_stdout_by_itself(engine, x, capsys):
    """Rule 33: `l.summary()` prints."""
    with regrow.ledger() as ledger:
        engine.checkpoint(torch.sin, x).sum().backward()
    ledger.summary()
    assert "sin" in capsys.readouterr().out


def test_json_has_every_row(engine, x):
    """Rule 33: for whoever draws or compares."""
    with regrow.ledger() as ledger:
        engine.checkpoint(Block(), x).sum().backward()
    read = json.loads(ledger.to_json())
    assert set(read) == {"version", "total", "labels", "calls", "sessions", "warnings"}
    assert read["calls"][0]["label"] == "Block"
    assert read["total"]["peak_bytes"] == peak_of(engine)
    assert read["labels"]["Block"]["replays"] == 1


@pytest.mark.parametrize("keep", [0, True, "all"])
def test_keep_is_a_number(keep):
    """Rule 19: a bad argument is refused at once."""
    with pytest.raises(ValueError, match="keep must be a number of at least 1"):
        regrow.ledger(keep=keep)
