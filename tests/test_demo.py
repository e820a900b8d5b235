"""The demo: `regrow demo` as a user runs it, and the parts that its figures rest on.

Most tests are the one rank of a pipeline themselves: schedules with two stages on each rank run whole on one.
"""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.distributed.pipelining import stage as torch_stage

import regrow
from regrow import cli
from regrow.call import checkpoint
from regrow.cli import app, compare, corpus, experiment, gpt, memory, work
from regrow.cli.figures import Row, row
from regrow.cli.gpt import Block, Shape, StageModule
from regrow.cli.meaning import meaning
from regrow.cli.memory import Footprint
from regrow.cli.progress import progress
from regrow.cli.rank import Rank
from regrow.cli.report import caption, percents, table
from regrow.cli.settings import Settings
from regrow.cli.stopwatch import Stopwatch
from regrow.cli.trainee import Seen, Trainee
from regrow.cli.variants import VARIANTS, plain_block
from regrow.pipelining import _compat

CPU = torch.device("cpu")
TINY = Shape(n_blocks=2, width=32, n_heads=4, length=16)
SMALL = ("--steps", "1", "--micro-batches", "2", "--device", "cpu", "--corpus", __file__)
MAIN = "from regrow.cli import main; main()"
NAMES = tuple(variant.name for variant in VARIANTS)


def typed(*arguments):
    """What one gets who types this after `regrow`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = app.run(arguments)
    return SimpleNamespace(exit_code=status, stdout=out.getvalue(), stderr=err.getvalue())


def run(*arguments):
    """The demo; a later --corpus counts."""
    return typed("demo", "--corpus", __file__, *map(str, arguments))


@cache
def source():
    return corpus.load(Path(__file__), length=TINY.length)


def tiny(steps=2, **options):
    defaults = {"command": "regrow demo", "micro_batches": 2, "seed": 0, "n_ranks": 1, "shape": TINY}
    return Settings(steps=steps, corpus=Path(__file__), **(defaults | options))


@pytest.fixture
def rank(one_rank):
    """This process, alone."""
    return Rank(0, 1, CPU)


def trained(rank, settings, variants=VARIANTS):
    """The variants after their steps."""
    trainees = [Trainee(variant, settings, rank) for variant in variants]
    compare.warm_up(trainees, settings, source(), rank)
    for _ in compare.train(trainees, settings, source(), rank):
        pass
    return trainees


def lines(output):
    """The table's rows by what they are about, where variants stand side by side."""
    rows = [line.rsplit(maxsplit=4) for line in output.splitlines() if line.startswith(("loss ", "replays "))]
    return {name: figures for name, *figures in rows}


def in_a_fresh_process(program, *arguments):
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def rows(*, times=(1.0, 3.5, 1.3, 1.2), peaks=(100, 80, 40, 45)):
    """Figures of the four variants."""
    replays = ([0, 0], [1, 7], [1, 1], [1, 0])
    return [
        Row(name, 2.68385649, n, time and 0.5, time, (0.2, 0.1), Footprint(peak << 20, peak << 18))
        for name, n, time, peak in zip(NAMES, replays, times, peaks, strict=True)
    ]


def shown(renderable, width):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(renderable)
    return console.file.getvalue()


def with_wrong_gradients(factor):
    """The variants, one of regrow's with gradients of blocks that are wrong by a factor; forward is right."""

    def bent(block, x):
        out = checkpoint(block, x)
        out.register_hook(lambda gradient: gradient * factor)
        return out

    return (*VARIANTS[:2], replace(VARIANTS[2], run_block=bent), VARIANTS[3])


def test_the_command_shows_one_replay_where_torch_needs_seven():
    """Rule 9: two ranks, as installed: losses are those of no checkpoint, and libraries add nothing to stderr."""
    program = "from runpy import run_module; run_module('regrow', run_name='__main__')"
    result = in_a_fresh_process(program, "demo", *SMALL)
    assert result.returncode == 0, result.stderr
    assert "A GPT of 4 blocks, width 256, in 4 stages on 2 ranks (cpu), schedule zbv:" in result.stdout
    said = " ".join(result.stdout.split())
    assert "replays 0 1 to 7 1 0 to 1 " in said
    assert "replays it once for both" in said
    assert "The run is too short to compare step times." in said
    (losses,) = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("loss  ")]
    assert len(losses) == 4
    assert len(set(losses)) == 1
    assert result.stderr == ""


def test_a_rank_counts_replays_by_block(rank, capsys):
    """Rule 9: the first stage has no dx; in the last one, a micro-batch whose backward comes next is kept."""
    trainees = trained(rank, tiny())
    compare.weigh(trainees, tiny(), source(), rank)
    assert [trainee.seen.replays for trainee in trainees] == [
        {0: [0], 1: [0]},
        {0: [1], 1: [7]},
        {0: [1], 1: [1]},
        {0: [1], 1: [0]},
    ]


def test_a_step_weighs_less_with_regrow(rank):
    """Rule 11: what forward and a replay hold has an end, so peak and kept bytes lie below those of no checkpoint."""
    settings = tiny(steps=1, micro_batches=4)
    trainees = trained(rank, settings)
    compare.weigh(trainees, settings, source(), rank)
    plain, native, lazy, prefired = (trainee.seen.footprint for trainee in trainees)
    assert lazy.retained_bytes == native.retained_bytes < plain.retained_bytes / 1.5
    assert lazy.peak_bytes < min(plain.peak_bytes, native.peak_bytes)
    assert prefired.peak_bytes < plain.peak_bytes


def test_figures_of_memory_repeat(rank):
    """Rule 12: nothing grows with the number of steps."""
    settings = tiny(steps=3)
    trainees = trained(rank, settings)
    seen = []
    for _ in range(2):
        for _ in compare.train(trainees, settings, source(), rank):
            pass
        compare.weigh(trainees, settings, source(), rank)
        seen.append([trainee.seen.footprint for trainee in trainees])
    assert seen[0] == seen[1]


def test_a_pipeline_gives_the_gradients_of_a_plain_backward(rank):
    """Rule 1: the oracle is one ordinary backward of the whole model, not cut at all."""
    settings = tiny(steps=1, shape=replace(TINY, dropout=0.0))
    trainees = trained(rank, settings, [VARIANTS[0], VARIANTS[3]])
    model = StageModule(settings.shape, range(2), plain_block, seed=settings.seed)
    batch = source().draw(4, TINY.length, seed=settings.seed, device=CPU)
    loss = gpt.loss(model(batch.tokens), batch.targets)
    loss.backward()
    whole = [parameter.grad for parameter in model.parameters()]
    for trainee in trainees:
        torch.testing.assert_close(trainee.seen.losses[0], loss.detach())
        cut = list(trainee.named_gradients().values())
        for mine, theirs in zip(cut, whole, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_variants_that_train_alike_are_exit_status_0(rank, capsys):
    """Rule 1: losses and gradients of every variant are those of torch's own stages without checkpoints."""
    assert work.compare_on(rank, tiny(steps=5), VARIANTS) == 0
    captured = capsys.readouterr()
    assert "bit for bit" in " ".join(captured.out.split())
    assert "step 5 of 5, loss" in captured.out
    assert captured.err == ""


def test_gradients_that_disagree_are_exit_status_1(rank, capsys):
    """Rule 1: a wrong gradient is found though every loss is right: AdamW forgives a factor."""
    assert work.compare_on(rank, tiny(steps=1), with_wrong_gradients(1.001)) == 1
    captured = capsys.readouterr()
    first, last = captured.err.splitlines()
    assert first.startswith("regrow demo: rank 0: regrow, lazily differs from no checkpoint in the gradients of")
    assert "stage 0: " in first
    assert "figures above mean nothing" in last
    assert "bit for bit" not in captured.out


def test_losses_that_disagree_are_named(rank):
    """Rule 1: the message says how many differ, and the first."""
    found = compare.disagreements(trained(rank, tiny(steps=3), with_wrong_gradients(-1)))
    assert found[0].startswith("regrow, lazily differs from no checkpoint in 2 of 3 losses, first in step 2: ")


def test_a_missing_gradient_disagrees(rank):
    """Rule 1: no gradient is not a gradient of zero."""
    trainees = trained(rank, tiny(steps=1))
    assert compare.disagreements(trainees) == []
    trainees[3].modules[1].head[1].bias.grad = None
    (fault,) = compare.disagreements(trainees)
    assert "gradients of 1 of" in fault
    assert fault.endswith("in step 1, first stage 1: head.1.bias.")


def test_a_warm_up_leaves_no_trace(rank):
    """Rule 1: losses, replays and times are those of the steps alone."""
    settings = tiny()
    cold = [Trainee(variant, settings, rank) for variant in VARIANTS]
    for _ in compare.train(cold, settings, source(), rank):
        pass
    warm = trained(rank, settings)
    for one, other in zip(cold, warm, strict=True):
        assert one.seen.losses == other.seen.losses
        assert len(other.seen.step_s) == len(other.seen.idle) == 2


def test_a_model_is_the_same_however_it_is_cut():
    """Each part draws its parameters from a seed of its own."""
    whole = StageModule(TINY, range(2), plain_block, seed=3)
    cut = [StageModule(TINY, gpt.blocks_of(stage, 2, 2), plain_block, seed=3) for stage in range(2)]
    parts = [parameter for module in cut for parameter in module.parameters()]
    for mine, theirs in zip(whole.parameters(), parts, strict=True):
        assert torch.equal(mine, theirs)


def test_every_block_has_its_stage():
    """No block is left out, none stands twice, and the shares differ by one at most."""
    for n_blocks in range(4, 12):
        places = [gpt.blocks_of(stage, 4, n_blocks) for stage in range(4)]
        assert [index for place in places for index in place] == list(range(n_blocks))
        assert max(map(len, places)) - min(map(len, places)) <= 1


def test_only_what_is_watched_is_busy_time(monkeypatch):
    """Time in a function called by another one counts once."""
    clock = iter([0.0, 1.0, 10.0, 13.0])
    monkeypatch.setattr("regrow.cli.stopwatch.perf_counter", lambda: next(clock))
    watch = Stopwatch()
    inner = watch.timed(lambda: None)
    inner()
    watch.timed(inner)()
    assert watch.busy_s == 4.0


def test_a_row_takes_the_slowest_rank_and_the_largest():
    """A step is as long as its slowest rank takes; the order of blocks is that of the model, not of the ranks."""
    seen = [
        Seen([torch.tensor(2.5)], {0: [1], 3: [7]}, [1.0, 3.0] * 3, [0.1] * 6, Footprint(5, 2)),
        Seen([], {1: [2], 2: [3]}, [2.0, 2.0] * 3, [0.3] * 6, Footprint(4, 3)),
    ]
    reference = [Seen([torch.tensor(2.5)], {}, [1.0] * 6), Seen([], {}, [0.5] * 6)]
    got = row("mine", seen, reference)
    assert got == Row("mine", 2.5, [1, 2, 3, 7], 2.5, 2.5, [0.1, 0.3], Footprint(5, 3))


def test_ranks_with_different_options_are_refused(rank, monkeypatch):
    """Rule 19: torchrun starts each machine with words of its own."""
    monkeypatch.setattr(Rank, "gather", lambda self, mine: [mine, "other"])
    with pytest.raises(RuntimeError, match="rank 1 has other options or another text than rank 0"):
        rank.agree("options or another text", "mine")


def test_a_bar_is_shown_on_a_terminal(rank, monkeypatch):
    """With steps, loss and times; never without a number."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    assert work.compare_on(rank, tiny(), VARIANTS) == 0
    seen = terminal.getvalue()
    assert "━" in seen
    assert "2/2" in seen
    assert "elapsed" in seen
    assert "left" in seen
    assert "nan" not in seen
    assert "step 1 of 2" not in seen


def test_every_bad_option_is_named_in_a_line_of_its_own(tmp_path):
    """Rule 19: nothing is trained before all options are right."""
    nowhere = tmp_path / "no"
    counts = ("--steps", 0, "--blocks", -1, "--micro-batches", 0, "--ranks", 0)
    result = run(*counts, "--seed", -5, "--device", "sundial", "--corpus", nowhere)
    assert result.exit_code == 2
    *said, device_line, corpus_line = result.stderr.splitlines()
    assert said == [
        "regrow demo: --steps: 0 is too few. Give 1 or more.",
        "regrow demo: --blocks: -1 is too few. Give 1 or more.",
        "regrow demo: --micro-batches: 0 is too few. Give 1 or more.",
        "regrow demo: --ranks: 0 is too few. Give 1 or more.",
        "regrow demo: --seed: -5 is out of range. Give 0 to 4294967295.",
    ]
    assert device_line.startswith("regrow demo: --device: sundial is not on this machine. Give cpu")
    assert corpus_line.startswith(f"regrow demo: --corpus: {nowhere} does not exist. Name a text file")
    assert not result.stdout


def test_a_short_corpus_says_how_much_it_takes(tmp_path):
    """Rule 19: with numbers."""
    (tmp_path / "short.txt").write_bytes(b"x" * 128)
    result = run("--corpus", tmp_path / "short.txt")
    assert result.exit_code == 2
    assert "holds 128 bytes of text, one piece needs 129. Name a longer text." in result.stderr
    (tmp_path / "short.txt").write_bytes(b"x" * 129)
    assert len(corpus.load(tmp_path / "short.txt", length=128).text) == 129


def test_a_corpus_without_text_says_what_was_skipped(tmp_path):
    """Rule 19: binary files do not count, and the message says so."""
    for name in "ab":
        (tmp_path / name).write_bytes(b"\0" * 999)
    with pytest.raises(ValueError, match=r"0 bytes of text \(2 files with NUL bytes skipped, which are not text\)"):
        corpus.load(tmp_path, length=128)


def test_the_device_is_one_that_is_there(monkeypatch):
    """Rule 19: the CPU always is; an accelerator is taken where each rank gets one of its own."""
    assert experiment.find_device("cpu", 2) == "cpu"
    with pytest.raises(ValueError, match=r"--device: meta is not on this machine\. Give cpu"):
        experiment.find_device("meta", 1)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [experiment.find_device(None, n) for n in (1, 2, 3)] == ["cuda", "cuda", "cpu"]
    with pytest.raises(ValueError, match=r"--device: 3 ranks need as many devices, this machine has 2 of type cuda"):
        experiment.find_device("cuda", 3)


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path):
    """The same folder is the same text on every machine."""
    (tmp_path / "b.txt").write_bytes(b"world")
    (tmp_path / "a.txt").write_bytes(b"hello ")
    (tmp_path / "c.bin").write_bytes(b"\0not text")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "a.txt").write_bytes(b"hidden")
    assert bytes(corpus.load(tmp_path, length=4).text.tolist()) == b"hello world"


def test_the_standard_library_is_read_up_to_a_limit():
    """Some megabytes of real source, without what is installed below the library."""
    text = corpus.load(None, length=128).text
    assert 1 << 20 < len(text) <= 4 << 20
    assert torch.equal(text, corpus.load(None, length=128).text)


def test_targets_are_the_bytes_that_follow(tmp_path):
    """A draw depends on its seed alone."""
    (tmp_path / "abc.txt").write_bytes(bytes(range(1, 100)))
    text = corpus.load(tmp_path, length=8)
    batch = text.draw(6, 8, seed=1, device=CPU)
    assert batch.tokens.shape == batch.targets.shape == (6, 8)
    assert torch.equal(batch.tokens + 1, batch.targets)
    assert torch.equal(text.draw(6, 8, seed=1, device=CPU).tokens, batch.tokens)
    assert not torch.equal(text.draw(6, 8, seed=2, device=CPU).tokens, batch.tokens)


def test_bytes_are_what_the_step_allocates():
    """Sizes known beforehand: a kept tensor counts in both figures, a passing one in the peak."""
    before = torch.zeros(1 << 20)

    def step():
        with torch.profiler.record_function("all"):
            kept = torch.zeros(1000)
            torch.zeros(4000)
            for _ in range(2):
                with torch.profiler.record_function("backward"):
                    before.add_(1)
                    both = torch.zeros(2000)
                    del both
            del kept

    footprint = memory.measure(step, CPU, memory.Marks(step="all", backward="backward"))
    assert footprint == memory.Footprint(peak_bytes=20_000, retained_bytes=4_000)


def test_a_block_has_twelve_parameters_in_six_groups():
    """What the seven replays of torch are: one for dx, one for each group."""
    names = [name for name, _ in Block(TINY).named_parameters()]
    assert len(names) == 12
    assert len({name.partition(".")[0] for name in names}) == 6


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_line_says_so(missing):
    """Rule 20: the package works without typer and rich; the command line says in one sentence what to install."""
    result = in_a_fresh_process(f"import sys; sys.modules[{missing!r}] = None; {MAIN}", "demo", *SMALL)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"regrow: the command line needs {missing}")
    assert line.endswith("pip install 'regrow[cli]'")


def test_a_missing_private_name_is_named(monkeypatch):
    """Rule 23: what regrow.pipelining needs of torch and does not find is named in a sentence."""
    monkeypatch.delattr(torch_stage._PipelineStageBase, "backward_weight_one_chunk")
    with pytest.raises(ImportError) as raised:
        importlib.reload(_compat)
    line = cli._explained(raised.value)
    assert "backward_weight_one_chunk" in line
    assert torch.__version__ in line


def test_help_and_version_do_not_import_torch():
    """Rule 20: who asks for help does not wait for a framework."""
    for arguments in (("--help",), ("demo", "--help"), ("train", "--help"), ("--version",)):
        program = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {MAIN}"
        result = in_a_fresh_process(program, *arguments)
        assert result.returncode == 0, result.stderr
        text, imported = result.stdout.rsplit("\n", 2)[:2]
        assert imported == "False"
        assert text
    assert text == f"regrow {regrow.__version__}"


@pytest.mark.parametrize("module", ["regrow.cli.app", "torch"])
def test_ctrl_c_while_modules_load_is_quiet(module):
    """A program that Ctrl-C ended has status 130 and nothing to say."""
    program = f"""
import signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
{MAIN}"""
    result = in_a_fresh_process(program, "demo", *SMALL)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (("demo", "--steps", "x"), "regrow demo: --steps: "),
        (("demo", "--stops", "3"), "regrow demo: No such option: --stops"),
        (("demos",), "regrow: No such command 'demos'."),
    ],
)
def test_a_mistyped_command_gets_one_plain_line(arguments, start):
    """Rule 19: the same style, whoever finds the fault."""
    result = typed(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(start)
    assert line.endswith(f" See {start.partition(':')[0]} --help.")


def test_no_command_is_answered_with_help():
    """Status 2: nothing was done."""
    result = typed()
    assert result.exit_code == 2
    assert "Train a small GPT through a pipeline four ways, and compare." in result.stderr


@pytest.mark.parametrize("width", [64, 79, 80, 89, 90, 120])
def test_every_number_stays_whole(width):
    """The numbers are the point."""
    text = shown(table(rows(), width), width)
    assert text.count("2.68385649") == 4
    assert "…" not in text
    for number in ("100.0", "80.0", "40.0", "25.0", "3.50", "1.30"):
        assert number in text


def test_too_few_steps_are_not_timed():
    """A median of cold starts says nothing, and the caption says so."""
    short = rows(times=(None,) * 4)
    assert "step time: - for fewer than 5 steps" in caption(short, 1)
    assert "median" in caption(rows(), 5)
    assert "too short to compare step times" in meaning(*short)


def test_the_closing_words_follow_the_numbers():
    """What is no gain is not told as one."""
    good = meaning(*rows())
    assert "a step takes 1.30 times as long as with no checkpoint and its peak is 60% below that" in good
    assert "Ranks are then idle for 20%, 10% of a step" in good
    assert "not" not in good.replace("no checkpoint", "")
    bad = meaning(*rows(times=(1.0, 1.1, 1.2, 1.2), peaks=(100, 110, 120, 120)))
    assert "its peak is 20% above that of no checkpoint" in bad
    assert "At this size regrow does not lower the peak" in bad
    assert "Its peak is not below that of torch's checkpoint." in bad
    assert "Its step is not faster than that of torch's checkpoint." in bad


def test_many_ranks_are_told_by_their_span():
    """A cell has room for two."""
    assert [percents(values) for values in ([], [0.5], [0.5, 0.25], [0.5, 0.25, 0.0])] == [
        "-",
        "50%",
        "50%, 25%",
        "0% to 50%",
    ]


def test_a_bar_fits_a_narrow_terminal(monkeypatch):
    """One line, without a loss before there is one."""
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    assert list(progress(console, iter([3.25, 3.0]), 2)) == [3.25, 3.0]
    seen = console.file.getvalue()
    assert "loss" not in seen.partition("2")[0]
    assert "loss 3.000" in seen
    assert "left" in seen
