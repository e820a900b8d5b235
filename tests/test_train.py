"""`regrow train`: every schedule, ranks that this machine starts, ranks that torchrun starts, ranks that end early."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from regrow.cli import compare, options, work
from regrow.cli.kinds import KINDS
from regrow.cli.launching import RankError, launch
from regrow.cli.rank import Rank
from regrow.cli.trainee import Trainee
from regrow.cli.variants import VARIANTS, Variant, regrow_block
from regrow.pipelining import PipelineStage, plan
from tests.rank_programs import wait_for_a_peer_that_ends
from tests.test_demo import CPU, source, tiny, typed

LIMIT_S = 120
UNBUFFERED = {**os.environ, "PYTHONUNBUFFERED": "1"}
SHORT = ("--schedule", "1f1b", "--micro-batches", "2", "--corpus", __file__, "--device", "cpu")


@pytest.fixture
def rank(one_rank):
    """This process, alone."""
    return Rank(0, 1, CPU)


def train(*arguments):
    return typed("train", "--corpus", __file__, *map(str, arguments))


def settings_of(schedule, **options):
    kind = KINDS[schedule]
    return tiny(command="regrow train", schedule=schedule, n_stages=kind.stages, **options)


@pytest.mark.parametrize("name", KINDS)
def test_every_schedule_trains_as_it_does_without_checkpoints(rank, name):
    """Rule 1: the oracle is torch's stages under the same schedule; each block is replayed once."""
    settings = settings_of(name)
    trainees = [Trainee(variant, settings, rank) for variant in (VARIANTS[0], VARIANTS[2])]
    for _ in compare.train(trainees, settings, source(), rank):
        pass
    assert compare.disagreements(trainees) == []
    compare.warm_up(trainees, settings, source(), rank)
    for _ in compare.train(trainees, settings, source(), rank):
        pass
    replays = [module.replays() for module in trainees[1].modules.values()]
    assert set().union(*replays) == {1}


def test_training_ends_with_one_row(rank, capsys):
    """Progress, then the figures; a step's time is its own, for nothing is there to measure it against."""
    variant = Variant("zbv", regrow_block, PipelineStage, {})
    assert work.train_on(rank, settings_of("zbv", steps=5), variant) == 0
    out = capsys.readouterr().out
    assert "step 5 of 5, loss" in out
    assert " ms\n" in out
    assert "the median of the steps" in " ".join(out.split())
    assert "no checkpoint" not in out


def test_figures_follow_the_options(rank):
    """Rule 9: what is let go between dx and dw is replayed once more."""
    settings = settings_of("zbv")
    choices = ({"keep": "never"}, {"keep": "never", "retention": "none"}, {"keep": "auto"})
    seen = []
    for attached in choices:
        trainee = Trainee(Variant("mine", regrow_block, PipelineStage, attached), settings, rank)
        compare.warm_up([trainee], settings, source(), rank)
        for _ in compare.train([trainee], settings, source(), rank):
            pass
        seen.append([module.replays() for module in trainee.modules.values()])
    assert seen == [[[1], [1]], [[1], [2]], [[1], [0]]]


def test_the_words_are_those_of_attach():
    """They are written down again, for whoever asks for help does not wait for torch."""
    assert (options.PREFIRE, options.RETENTION, options.KEEP) == (plan.PREFIRE, plan.RETENTION, plan.KEEP)


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_holds_the_stages_that_torch_gives_it(name):
    """The oracle is torch's own table."""
    kind = KINDS[name]
    for n_ranks in (1, 2, 3):
        table = generate_stage_to_rank_mapping(n_ranks, n_ranks * kind.stages, "v" if kind.v_shaped else "loop")
        for index in range(n_ranks):
            held = list(kind.held_by(index, n_ranks, kind.stages))
            assert held == [stage for stage, holder in table.items() if holder == index]


def test_every_bad_option_is_named_in_a_line_of_its_own(tmp_path):
    """Rule 19: nothing is started before all options are right."""
    result = train("--schedule", "zvb", "--prefire", "soon", "--retention", "some", "--keep", "it", "--stages", 0)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "regrow train: --stages: 0 is too few. Give 1 or more.",
        f"regrow train: --schedule: zvb is not one of {', '.join(KINDS)}.",
        "regrow train: --prefire: soon is not one of off, on_wait, on_any_wait.",
        "regrow train: --retention: some is not one of all, needed, none.",
        "regrow train: --keep: it is not one of auto, never.",
    ]
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("zbv", "--stages", 3), "--stages: zbv takes 2 stages per rank, got 3."),
        (("gpipe", "--stages", 2), "--stages: gpipe takes 1 stage per rank, got 2."),
        (("gpipe", "--prefire", "on_wait"), "--prefire: gpipe has no place for it. Give off, or leave it out."),
        (("dualpipev",), "--micro-batches: 3 is too few for 4 stages. Give 4 or more."),
        (
            ("interleaved-zb", "--micro-batches", 5),
            "--micro-batches: interleaved-zb on 2 ranks cannot share 5 out evenly. Give 4 or 6.",
        ),
        (
            ("looped-bfs", "--stages", 3, "--blocks", 5),
            "--blocks: 5 is too few for 6 stages, 3 on each of 2 ranks. Give 6 or more.",
        ),
    ],
)
def test_what_does_not_fit_together_is_named_with_what_would(arguments, line):
    """Rule 19: torch would find it on every rank, when all have started."""
    result = train("--ranks", 2, "--micro-batches", 3, "--schedule", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"regrow train: {line}\n"


@pytest.mark.parametrize(("local", "lines"), [(0, 1), (1, 0)])
def test_started_ranks_complain_once_per_machine(monkeypatch, local, lines):
    """Rule 19: torchrun starts several processes with the same words."""
    started = {"TORCHELASTIC_RUN_ID": "it", "RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))
    result = train("--ranks", 3)
    assert result.exit_code == 2
    said = ["regrow train: --ranks: 3, but 2 ranks were started. Leave it out."]
    assert result.stderr.splitlines() == said[:lines]


@pytest.mark.parametrize(
    ("how", "said"), [("raises", "failed: ZeroDivisionError: no more"), ("is killed", "was killed by SIGKILL")]
)
def test_a_rank_that_ends_early_ends_the_run(how, said):
    """The other one waits for it, without a limit, and is ended; the error is that of the one that began."""
    with pytest.raises(RankError) as raised:
        launch(2, wait_for_a_peer_that_ends, how)
    assert str(raised.value) == f"rank 1 {said}"
    assert ("wait_for_a_peer_that_ends" in raised.value.traceback) == (how == "raises")


def test_a_failed_rank_is_exit_status_1(monkeypatch):
    """Its traceback, then one line: which, and why."""

    def failing(*_):
        raise RankError(1, "failed: ZeroDivisionError: no more", "Traceback: here\n")

    monkeypatch.setattr("regrow.cli.experiment.launch", failing)
    result = train("--steps", 1)
    assert result.exit_code == 1
    assert result.stderr == (
        "Traceback: here\nregrow train: rank 1 failed: ZeroDivisionError: no more. The other ranks were ended.\n"
    )


def test_ctrl_c_ends_all_ranks_quietly():
    """A terminal sends it to the launcher and its ranks: status 130, and nothing to say."""
    command = [sys.executable, "-m", "regrow", "train", "--ranks", "1", "--steps", "40", *SHORT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, env=UNBUFFERED, **pipes) as process:
        while not process.stdout.readline().startswith("step 10 of 40"):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (130, "")
    assert "loss " not in out.replace(", loss ", "")  # no table


def test_torchrun_on_two_machines_trains_as_one():
    """Two launchers that meet over the network, here over loopback; both processes are ranks of one pipeline."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--rdzv-id", "it", "--local-addr", "127.0.0.1"]
    work = [*command, "-m", "regrow", "train", "--steps", "1", *SHORT]
    machines = [subprocess.Popen(work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [machine.communicate(timeout=LIMIT_S) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    (out,) = [out for out, _ in said if out]  # rank 0 alone
    assert "in 2 stages on 2 ranks (cpu), schedule 1f1b" in out
    assert "step 1 of 1, loss" in out


def test_the_same_text_may_lie_elsewhere(rank, monkeypatch, tmp_path):
    """Machines have folders of their own: what must agree is the text, not its name."""
    copy = tmp_path / "copy"
    copy.write_bytes(Path(__file__).with_name("test_demo.py").read_bytes())
    agreed = []
    monkeypatch.setattr(Rank, "agree", lambda self, what, mine: agreed.append(mine))
    for place in (tiny().corpus, copy):
        work.train_on(rank, replace(tiny(steps=1), corpus=place), VARIANTS[0])
    assert agreed[0] == agreed[1]
