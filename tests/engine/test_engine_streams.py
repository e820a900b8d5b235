"""Streams of a device: a replay goes where forward was, or beside it and is waited for. A fake device proves it."""

import json
from pathlib import Path

import pytest

REPLAY = ["main makes 5", "main makes 6"]
BOTH_ENGINES = pytest.mark.parametrize("engine", ["", ", reentrant"], ids=["hooks", "reentrant"])


@pytest.fixture(scope="module")
def happened(fresh_process):
    """What each scenario of the fake device gave."""
    program = Path(__file__).with_name("fake_streams.py")
    return json.loads(fresh_process(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"))


def test_a_prefire_on_a_stream_of_its_own_runs_beside_forwards(happened):
    """Rule 41: it waits for what forward's stream holds by then, and nobody waits for it before the first read."""
    assert happened["beside"]["fired"] == [
        "side waits",
        "side waits for main",
        "side makes 5",
        "side makes 6",
        "side records",
    ]


def test_the_first_read_waits_once(happened):
    """Rule 41: backward knows that every value is there, and a second pass does not wait again."""
    assert happened["beside"]["joined"] == ["main waits"]
    assert happened["beside"]["again"] == []
    assert happened["beside"]["reads"] == [True] * 4


def test_the_allocator_is_told(happened):
    """Rule 41: the replay reads the input (4) on the side, backward what it made (5, 6) on forward's stream."""
    assert happened["beside"]["told"] == [[4, 1], [5, 0], [6, 0]]


def test_the_first_read_waits_if_the_context_was_open_before(happened):
    """Rule 41: the prefire stands inside the context that backward reads in."""
    assert happened["in an open context"] == [["main waits"], [True, True]]


def test_a_thread_that_backward_runs_on_waits(happened):
    """Rule 41: as the worker threads of an accelerator do."""
    assert happened["on another thread"] == [True, True]


def test_a_reader_on_a_third_stream_waits(happened):
    """Rule 41: and forward's, where the others will read."""
    assert happened["reader on a third"] == [["main waits", "third waits"], [True, True]]


def test_a_call_inside_another_waits_for_its_inputs(happened):
    """Rule 41: they come from the outer call's replay on the side."""
    assert happened["inner from outer"] == [["main waits", "main makes 8"], [True] * 3]


@pytest.mark.parametrize("end", ["cleared unread", "failed"])
def test_nothing_waits_for_a_replay_that_nobody_reads(happened, end):
    """Rule 41: one that was cleared, or failed, is forgotten; backward replays on forward's stream."""
    assert happened[end] == [REPLAY, [True, True]]


def test_on_forwards_stream_nothing_waits(happened):
    """Rule 41: the usual prefire costs no event."""
    assert happened["same stream"] == [REPLAY, [True, True]]


def test_casts_of_a_replay_on_the_side_are_its_own(happened):
    """Rule 41: the caller's autocast would hand them to work that has not waited for them."""
    forward, beside_nothing, aside, afterwards = happened["casts"]
    assert [forward, beside_nothing, afterwards] == [True] * 3
    assert not aside


@BOTH_ENGINES
def test_a_lazy_replay_goes_to_forwards_stream(happened, engine):
    """Rule 41: wherever backward asks from; its device stays the current one, and its stream waits."""
    log, reads, devices = happened["lazy elsewhere" + engine]
    assert log == [*REPLAY, "third waits", "third waits for main"]
    assert reads == [True, True]
    assert devices == [0, 3, 3]


def test_the_reentrant_engine_replays_on_forwards_stream(happened):
    """Rule 41: its backward runs where its replay ran, so a stream of the caller's is left for forward's."""
    assert happened["beside, reentrant"]["fired"] == [*REPLAY, "side waits", "side waits for main"]
    assert happened["beside, reentrant"]["reads"] == [True] * 4
