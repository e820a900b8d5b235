"""Timelines: what ranks did when, as numbers, as JSON that Perfetto reads, and as a picture."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import regrow
from regrow._core.events import Forward, Ran, Released, Replayed
from regrow.cli import work
from regrow.cli.options import Options
from regrow.cli.rank import Rank
from regrow.cli.variants import Variant, regrow_block
from regrow.pipelining import PipelineStage
from regrow.trace.gantt import draw, hidden
from regrow.trace.timeline import Timeline
from tests.pipelining.conftest import make_pipeline
from tests.test_demo import CPU, tiny, typed

MS = 1_000_000


def replayed(began, ended, **fields):
    usual = {"call": 1, "label": "block", "replay": 1, "session": "s", "prefired": True, "failed": False}
    rest = {"held_bytes": 1 << 20, "thread": 0, "shrunk": ()}
    return Replayed(**{**usual, "began_ns": began * MS, "ended_ns": ended * MS, **rest, **fields})


def released(at, replay=1):
    return Released(1, "block", replay, "s", True, "cleared", at * MS, 0, 1, False)


def recording(*events, rank=0, host="here", epoch_ns=0):
    return {"rank": rank, "host": host, "epoch_ns": epoch_ns, "events": [[type(e).__name__, *e] for e in events]}


STEP = (
    Ran("step", -1, -1, 0, 100 * MS),
    Ran("F", 0, 0, 0, 20 * MS),
    Ran("prefire", 0, 0, 20 * MS, 40 * MS, ("dx", 1, 0)),
    replayed(21, 39),
    Ran("dx", 0, 0, 60 * MS, 75 * MS),
    replayed(61, 66, replay=2, prefired=False),
    Ran("dw", 0, 0, 75 * MS, 90 * MS),
    released(90),
    released(91, replay=2),
)


def sender(sent_ms, kind="dx"):
    """What the other rank did: its gradient is sent when it is computed."""
    return recording(Ran("step", -1, -1, 0, 100 * MS), Ran(kind, 1, 0, 0, sent_ms * MS), rank=1)


def test_figures_are_sums_of_what_was_recorded():
    """Rule 33: 100 ms of a step, 70 of them busy; of 23 ms of replays 18 cost no time."""
    timeline = Timeline.of([recording(*STEP), sender(55)])
    lane = timeline.lanes[0]
    figures = timeline.figures(lane)
    assert figures.step_s == pytest.approx(0.1)
    assert figures.idle == pytest.approx(0.3)
    assert (figures.replay_s, figures.hidden_s) == pytest.approx((0.023, 0.018))
    waits = [at for each in lane.of("wait") for at in (each.began_s, each.ended_s)]
    assert waits == pytest.approx([0.04, 0.06, 0.09, 0.1])


@pytest.mark.parametrize(
    ("sent_ms", "kind", "share"),
    [(55, "dx", "78%"), (39, "B", "78%"), (30, "dx", "39%"), (20, "dx", "0%"), (55, "dw", "0%")],
)
def test_hidden_is_what_ran_before_the_gradient_was_sent(sent_ms, kind, share):
    """Rule 33: from then on the rank could have gone on; what nobody recorded hides nothing."""
    timeline = Timeline.of([recording(*STEP), sender(sent_ms, kind)])
    assert f"; {share} of it was hidden" in hidden(timeline)


def test_each_step_waits_for_its_own_gradient():
    """Rule 33: the second of two steps does not look at what the first was sent."""
    later = [
        each._replace(**{name: getattr(each, name) + 200 * MS for name in each._fields if name.endswith("_ns")})
        for each in STEP
    ]
    other = [Ran("dx", 1, 0, 0, 55 * MS), Ran("dx", 1, 0, 200 * MS, 220 * MS)]
    timeline = Timeline.of([recording(*STEP, *later), recording(*other, rank=1)])
    assert timeline.figures(timeline.lanes[0]).hidden_s == pytest.approx(0.018)


def test_what_is_held_is_a_curve():
    """Rule 33: from the end of a replay until it is released, or found to hold less."""
    events = (replayed(0, 10), replayed(10, 20, replay=2, held_bytes=3 << 20, shrunk=((1, 1 << 10),)), released(30, 2))
    (lane,) = Timeline.of([recording(*events)]).lanes
    assert [n for _, n in lane.held] == [1 << 20, (3 << 20) + 1024, 1024]
    assert [at for at, _ in lane.held] == pytest.approx([0.01, 0.02, 0.03])


def test_ranks_of_one_machine_share_a_clock_and_others_the_calendar():
    """Rule 33: the first thing of all is at zero."""
    both = [
        recording(Ran("F", 0, 0, 5 * MS, 9 * MS)),
        recording(Ran("F", 1, 0, 8 * MS, 9 * MS), rank=1, epoch_ns=50 * MS),
    ]
    assert [lane.slices[0].began_s for lane in Timeline.of(both).lanes] == pytest.approx([0, 0.003])
    both[1]["host"] = "elsewhere"
    assert [lane.slices[0].began_s for lane in Timeline.of(both).lanes] == pytest.approx([0, 0.053])


def test_json_is_what_perfetto_reads():
    """Rule 33: complete events with times in microseconds, one process for each rank, and a counter."""
    timeline = Timeline.of([recording(*STEP), recording(Ran("F", 1, 3, 0, 5 * MS), rank=1)], "mine")
    read = json.loads(timeline.to_json())
    complete = [event for event in read["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1}
    assert {event["tid"] for event in complete} == {0}
    (dx,) = [event for event in complete if event["cat"] == "dx"]
    assert (dx["name"], dx["ts"], dx["dur"]) == ("dx 0 (stage 0)", pytest.approx(60_000), pytest.approx(15_000))
    assert {event["name"] for event in complete if event["cat"] == "R"} == {"R block"}
    assert {event["cat"] for event in complete} == {"step", "F", "prefire", "R", "dx", "dw", "wait"}
    names = [event["args"]["name"] for event in read["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    assert [event["args"]["bytes"] for event in read["traceEvents"] if event["ph"] == "C"][:1] == [1 << 20]


def test_json_can_be_read_back():
    """Rule 33: nothing is lost."""
    timeline = Timeline.of([recording(*STEP)], "mine")
    again = Timeline.from_json(timeline.to_json())
    assert (again.title, again.lanes) == ("mine", timeline.lanes)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_pictures_are_files_of_their_kind(tmp_path, suffix):
    """Rule 33: whatever matplotlib writes; a picture has a size."""
    path = tmp_path / f"run.{suffix}"
    draw(Timeline.of([recording(*STEP), recording(Ran("F", 1, 0, 0, 5 * MS), rank=1)], "mine"), path)
    content = path.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])
    if suffix == "png":
        width, height = struct.unpack(">II", content[16:24])
        assert width > 1200
        assert height > 300
    if suffix == "svg":
        assert b"stroke" in content


def test_a_plain_training_is_recorded_too(engine, tmp_path):
    """Rule 33: forwards and replays by name, without stages."""
    path = tmp_path / "run.json"
    x = torch.randn(4, requires_grad=True)
    with regrow.trace.record(path) as recorder:
        engine.checkpoint(lambda t: t.sin().exp(), x).sum().backward()
    (lane,) = Timeline.from_json(path.read_text()).lanes
    assert [each.kind for each in lane.slices] == ["call", "R"]
    assert recorder.recording()["rank"] == lane.rank == 0
    assert lane.held[0][1] == 16
    assert lane.held[-1][1] == 0
    assert "0% of it was hidden" in hidden(Timeline.from_json(path.read_text()))
    draw(Timeline.from_json(path.read_text()), tmp_path / "run.png")


def test_a_pipeline_is_recorded_action_by_action(one_rank, tmp_path):
    """Rules 26 and 33: the oracle is the schedule: a forward, and a backward in full or in halves."""
    pipeline = make_pipeline(
        "InterleavedZeroBubble",
        wrap=lambda module: regrow.apply_checkpointing(module, lambda name, _: name in {"0", "1"}) and module,
        keep="never",
    )
    pipeline.step()
    runs = sum(block.runs for block in pipeline.blocks)
    with regrow.trace.record(tmp_path / "run.json"):
        pipeline.step()
    timeline = Timeline.from_json((tmp_path / "run.json").read_text())
    (lane,) = timeline.lanes
    forwards = sorted((each.stage, each.micro_batch) for each in lane.of("F"))
    assert forwards == [(stage, index) for stage in range(2) for index in range(4)]
    assert sorted((each.stage, each.micro_batch) for each in lane.of("B", "dx")) == forwards
    assert sorted((e.stage, e.micro_batch) for e in lane.of("dw")) == sorted(
        (e.stage, e.micro_batch) for e in lane.of("dx")
    )
    assert len(lane.of("R")) + len(lane.of("call")) == sum(block.runs for block in pipeline.blocks) - runs
    assert len(lane.of("step")) == 1
    figures = timeline.figures(lane)
    assert figures.step_s == pytest.approx(figures.busy_s + sum(each.length_s for each in lane.of("wait")))
    assert lane.held[-1][1] == 0


def test_a_recorder_keeps_nothing_alive(engine, track, gc_off):
    """Rule 32: it holds numbers and words."""
    x = torch.randn(3, requires_grad=True)
    with regrow.trace.record() as recorder:
        loss = engine.checkpoint(lambda t: track(track(t.sin()).exp()).cos(), x).sum()
        loss.backward(retain_graph=True)
        assert track.alive == 0
        del loss
    assert {type(field) for _, *fields in recorder.recording()["events"] for field in fields} <= {
        *(int, str, bool, tuple, type(None))
    }


def test_only_the_youngest_events_are_kept(engine):
    """Rule 12: a recorder that stays open does not grow with the steps."""
    x = torch.randn(3, requires_grad=True)
    with regrow.trace.record(limit=10) as recorder:
        for _ in range(20):
            engine.checkpoint(torch.sin, x).sum().backward()
    assert len(recorder.recording()["events"]) == 10


def test_nothing_is_written_after_an_exception(tmp_path):
    """Rule 33: half a recording is none."""
    path = tmp_path / "run.json"
    with pytest.raises(ZeroDivisionError), regrow.trace.record(path):
        raise ZeroDivisionError
    assert not path.exists()


def test_replays_are_ranges_for_the_profiler(engine):
    """Rule 33: named after the module, while somebody listens and the profiler runs."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    regrow.apply_checkpointing(model, lambda name, _: name == "1", use_reentrant=engine.use_reentrant)
    with regrow.ledger(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.randn(2, 4)).sum().backward()
    ranges = [event.key for event in profiler.key_averages() if event.key.startswith("regrow")]
    assert ranges == ["regrow replay: 1 (GELU.forward)"]


@pytest.mark.parametrize("limit", [0, True, "all"])
def test_limit_is_a_number(limit):
    """Rule 19: a bad argument is refused at once."""
    with pytest.raises(ValueError, match="limit must be a number of at least 1"):
        regrow.trace.record(limit=limit)


def test_a_folder_that_does_not_exist_is_named_before_anything_is_recorded(tmp_path):
    """Rule 19: not after the step."""
    with pytest.raises(ValueError, match="does not exist"):
        regrow.trace.record(tmp_path / "nowhere" / "run.json")


def test_the_command_draws_and_says_what_was_hidden(tmp_path):
    """Rule 33: a picture next to the file, and a line for each rank."""
    path = tmp_path / "run.json"
    path.write_text(Timeline.of([recording(*STEP), sender(55)], "mine").to_json())
    result = typed("trace", "show", str(path))
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "run.png").exists()
    assert "rank 0  100.0 ms   30%  23.0 ms  18.0 ms" in result.stdout
    assert "78% of it was hidden in waits." in " ".join(result.stdout.split())


def test_the_command_takes_a_file_for_each_rank(tmp_path):
    """Rule 33: as ranks that record by themselves leave them."""
    paths = [tmp_path / f"{rank}.json" for rank in (1, 0)]
    for rank, path in zip((1, 0), paths, strict=True):
        path.write_text(Timeline.of([recording(*STEP, rank=rank)]).to_json())
    result = typed("trace", "show", *map(str, paths), "--out", str(tmp_path / "both.svg"))
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "both.svg").exists()
    assert result.stdout.index("rank 0") < result.stdout.index("rank 1")


def test_what_cannot_be_shown_is_named(tmp_path):
    """Rule 19: a line for each file."""
    other, twice = tmp_path / "other.json", tmp_path / "run.json"
    other.write_text("{}")
    twice.write_text(Timeline.of([recording(*STEP)]).to_json())
    result = typed("trace", "show", str(tmp_path / "none.json"), str(other))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"regrow trace show: {tmp_path / 'none.json'} cannot be read (No such file or directory).",
        f"regrow trace show: {other} is no timeline of regrow.trace.record or regrow train --trace "
        "(KeyError('regrow')).",
    ]
    assert "two files are of the same rank" in typed("trace", "show", str(twice), str(twice)).stderr
    assert "cannot be drawn" in typed("trace", "show", str(twice), "--out", str(tmp_path / "run.text")).stderr
    twice.write_text(Timeline.of([recording()]).to_json())
    assert "nothing was recorded" in typed("trace", "show", str(twice)).stderr


def test_training_records_one_more_step(one_rank, tmp_path, capsys):
    """Rule 33: of all ranks in one file, after the figures."""
    path = tmp_path / "run.json"
    settings = tiny(command="regrow train", schedule="zbv", n_stages=2, steps=1)
    variant = Variant("zbv", regrow_block, PipelineStage, {})
    assert work.train_on(Rank(0, 1, CPU), settings, variant, path) == 0
    assert f"regrow trace show {path}" in capsys.readouterr().out.replace("\n", "")
    (lane,) = Timeline.from_json(path.read_text()).lanes
    assert len(lane.of("step")) == 1
    assert len(lane.of("F")) == 2 * settings.micro_batches


def test_a_place_that_is_none_is_refused_before_anything_starts(tmp_path):
    """Rule 19: training takes long."""
    options = {"steps": 1, "blocks": None, "micro_batches": 4, "ranks": 2, "corpus": None, "device": None, "seed": 0}
    assert Options(**options, trace=tmp_path / "run.json").faults() == []
    for place in (tmp_path, tmp_path / "nowhere" / "run.json"):
        assert Options(**options, trace=place).faults() == [
            f"--trace: {place} is no place for a file. Name a file in a folder that exists."
        ]


def test_forward_in_a_replay_is_no_call_of_its_own():
    """Rules 15 and 33: what a replay makes lies in the replay."""
    forward = Forward(1, "inner", None, True, 0, MS, 0)
    assert Timeline.of([recording(forward)]).lanes[0].slices == []
