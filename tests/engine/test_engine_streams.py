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
def test_a_replay_that_nobody_reads_is_over(happened, end):
    """Rule 41: one that was cleared, or failed; backward replays on forward's stream."""
    assert happened[end] == [REPLAY, [True, True]]


def test_forwards_stream_waits_for_one_that_fails(happened):
    """Rule 41: what it left behind for all replays, as a copy of a kept result (12), may be read there."""
    log, told = happened["failed behind a clone"]
    assert log[-2:] == ["main waits", "main waits for side"]
    assert told == [[4, 1], [12, 1]]


def test_nobody_reads_what_is_not_queued(happened):
    """Rule 41: a reader on another thread, in the middle of the replay, stands and waits."""
    assert happened["read while it runs"] == [[False], [True, True]]


@BOTH_ENGINES
def test_what_hooks_bring_back_is_there_before_it_is_read(happened, engine):
    """Rule 41: copies that ``save_on_cpu`` makes for a lazy replay go to the stream that the replay runs on."""
    assert happened["inputs that hooks bring back" + engine] == [[True], [True, True]]


def test_on_forwards_stream_nothing_waits(happened):
    """Rule 41: the usual prefire costs no event."""
    assert happened["same stream"] == [REPLAY, [True, True]]


@pytest.mark.parametrize("around", ["", ", function mode"])
def test_casts_of_a_replay_on_another_stream_are_its_own(happened, around):
    """Rule 41: the caller's autocast would hand them to work that has not waited for them, or the other way round."""
    forward, prefired, aside, moved, afterwards = happened["casts" + around]
    assert [forward, prefired, afterwards] == [True] * 3
    assert [aside, moved] == [False] * 2


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
