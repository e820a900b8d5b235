"""The demo: `regrow demo` as a user runs it, and the parts that its figures rest on."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.distributed.pipelining import _backward

import regrow
from regrow import cli
from regrow._core import session
from regrow._core.replaying import is_recomputing
from regrow.call import checkpoint
from regrow.cli import _compat, app, compare, corpus, experiment, memory, training
from regrow.cli.compare import VARIANTS, Settings, Variant
from regrow.cli.gpt import GPT, Block, Shape
from regrow.cli.meaning import meaning
from regrow.cli.memory import Footprint
from regrow.cli.progress import progress
from regrow.cli.report import Row, caption, table

CPU = torch.device("cpu")
TINY = Shape(n_blocks=2, width=32, n_heads=4, length=16)
SMALL = ("--steps", "1", "--blocks", "1", "--micro-batches", "2", "--device", "cpu")


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


def tiny(steps=2):
    return Settings(steps=steps, micro_batches=2, seed=0, device=CPU, shape=TINY), source()


def cells(output):
    """The table's rows, by the variant's name."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    return {name: figures for name, *figures in rows}


def in_a_fresh_process(program, *arguments):
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


MAIN = "from regrow.cli import main; main()"


def rows(*, times=(1.0, 3.5, 1.3), peaks=(100, 80, 40)):
    """Figures of the three variants."""
    names, replays = ("no checkpoint", "torch", "regrow"), ([0], [7], [1])
    figures = zip(names, replays, times, peaks, strict=True)
    return [Row(name, 2.68385649, n, time, Footprint(peak << 20, peak << 18)) for name, n, time, peak in figures]


def shown(renderable, width):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(renderable)
    return console.file.getvalue()


def trained(run_block, steps=2):
    """A tiny model after a few steps with a variant, and its losses."""
    settings, text = tiny(steps)
    (trainee,) = compare.enroll(settings, [Variant("mine", run_block)])
    losses = list(compare.train([trainee], settings, text))
    return trainee.model, losses


def with_wrong_gradients(factor):
    """The variants, regrow's with gradients of blocks that are wrong by a factor; the values in forward are right."""

    def bent(block, x):
        out = checkpoint(block, x)
        out.register_hook(lambda gradient: gradient * factor)
        return out

    return (*VARIANTS[:2], Variant("regrow", bent))


def test_the_command_shows_one_replay_where_torch_needs_seven():
    """Rule 9: in each micro-batch prefire, dx and dw of a block share one replay; losses are those of no checkpoint."""
    result = run(*SMALL)
    assert result.exit_code == 0, result.stderr
    figures = cells(result.stdout)
    assert {name: row[1] for name, row in figures.items()} == {"no checkpoint": "0", "torch": "7", "regrow": "1"}
    assert len({row[0] for row in figures.values()}) == 1
    assert {row[2] for row in figures.values()} == {"-"}  # one step is no median
    assert "A GPT of 1 block, width 256, on cpu: 1 step of 2 micro-batches." in result.stdout
    assert "once for both" in " ".join(result.stdout.split())
    assert not result.stderr


def test_a_step_weighs_less_with_regrow():
    """Rule 11: what forward and a replay hold has an end, so peak and kept bytes lie below those of no checkpoint."""
    settings, text = tiny(steps=1)
    trainees = compare.enroll(settings, VARIANTS)
    with compare.steady(CPU):
        compare.weigh(trainees, settings, text)
    plain, native, ours = (trainee.footprint for trainee in trainees)
    assert ours.retained_bytes == native.retained_bytes < plain.retained_bytes / 2
    assert ours.peak_bytes < min(plain.peak_bytes, native.peak_bytes)


def test_figures_of_memory_repeat():
    """Rule 12: nothing grows with the number of steps."""
    settings, text = tiny(steps=3)
    trainees = compare.enroll(settings, VARIANTS)
    seen = []
    for _ in range(2):
        for _ in compare.train(trainees, settings, text):
            pass
        compare.weigh(trainees, settings, text)
        seen.append([trainee.footprint for trainee in trainees])
    assert seen[0] == seen[1]


def test_all_variants_train_alike():
    """Rule 1: losses and gradients of every variant are those of the plain call, bit for bit."""
    plain, native, ours = (trained(variant.run_block) for variant in VARIANTS)
    assert plain[1] == native[1] == ours[1]
    for name, parameter in plain[0].named_parameters():
        assert torch.equal(parameter.grad, ours[0].get_parameter(name).grad), name


def test_the_split_step_gives_the_gradients_of_a_plain_backward():
    """Rule 1: the oracle is one ordinary backward of the whole model."""
    settings, text = tiny()
    (trainee,) = compare.enroll(settings, VARIANTS[2:])
    batches = text.draw((2, 2, TINY.length), seed=0, device=CPU)
    torch.manual_seed(7)
    training.run_step(trainee.model, batches, checkpoint)
    split = {name: parameter.grad.clone() for name, parameter in trainee.model.named_parameters()}
    trainee.model.zero_grad()
    torch.manual_seed(7)
    for batch in batches:
        (trainee.model.loss(trainee.model.embed(batch.tokens), batch.targets, VARIANTS[0].run_block) / 2).backward()
    for name, parameter in trainee.model.named_parameters():
        torch.testing.assert_close(split[name], parameter.grad)


def test_a_step_prefires_before_dx_and_dw_replays_nothing():
    """Rule 9: the schedule's order, as a block sees it."""
    timeline = []

    def watched(block, x):
        def body(x):
            timeline.append("replay" if is_recomputing() else "forward")
            return block(x)

        x.register_hook(lambda _: timeline.append("dx"))
        return checkpoint(body, x)

    model = GPT(Shape(n_blocks=1, width=32, n_heads=4, length=TINY.length))
    training.run_step(model, source().draw((2, 2, TINY.length), seed=0, device=CPU), watched)
    assert timeline == ["forward", "forward", "replay", "dx", "replay", "dx"]


def test_a_step_that_raises_leaves_the_next_one_right():
    """Rule 11: the session is cleared where dx raises, so a later step may use its name again."""

    def failing(block, x):
        out = checkpoint(block, x)
        out.register_hook(lambda _: 1 / 0)
        return out

    settings, text = tiny()
    batches = text.draw((2, 2, TINY.length), seed=0, device=CPU)
    first, second = (compare.enroll(settings, VARIANTS[2:])[0].model for _ in range(2))
    with pytest.raises(RuntimeError, match="stage backward input") as raised:
        training.run_step(first, batches, failing)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)  # its traceback keeps the graph alive meanwhile
    assert not any(held.frames for held in session._sessions.values())
    first.zero_grad()
    for model in (first, second):
        torch.manual_seed(0)
        training.run_step(model, batches, checkpoint)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_gradients_that_disagree_are_exit_status_1(monkeypatch):
    """Rule 1: a wrong gradient is found though every loss is right: AdamW forgives a factor."""
    monkeypatch.setattr(compare, "VARIANTS", with_wrong_gradients(1.001))
    result = run(*SMALL)
    assert result.exit_code == 1
    assert "regrow differs from no checkpoint in the gradients of" in result.stderr
    assert "losses, first" not in result.stderr
    assert "bit for bit" not in result.stdout


def test_losses_that_disagree_are_named(capsys):
    """Rule 1: the message says how many differ, and the first."""
    settings, text = tiny(steps=3)
    assert experiment.execute(settings, text, with_wrong_gradients(-1)) == 1
    assert "regrow differs from no checkpoint in 2 of 3 losses, first in step 2: " in capsys.readouterr().err


def test_a_missing_gradient_disagrees():
    """Rule 1: no gradient is not a gradient of zero."""
    settings, text = tiny(steps=1)
    trainees = compare.enroll(settings, VARIANTS)
    for _ in compare.train(trainees, settings, text):
        pass
    assert compare.disagreements(trainees) == []
    trainees[2].model.head.bias.grad = None
    (fault,) = compare.disagreements(trainees)
    assert "gradients of 1 of" in fault
    assert "head.bias" in fault


def test_a_terminal_gets_a_progress_bar(monkeypatch):
    """A bar and a spinner are for people; what is no terminal gets lines."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    settings, text = tiny()
    assert experiment.execute(settings, text, VARIANTS) == 0
    seen = sys.stdout.getvalue()
    assert "━" in seen
    assert "2/2" in seen
    assert "elapsed" in seen
    assert "left" in seen
    assert "nan" not in seen
    assert "step 1 of 2" not in seen


def test_every_bad_option_is_named_in_a_line_of_its_own(tmp_path):
    """Rule 19: nothing is trained before all options are right."""
    nowhere = tmp_path / "no"
    counts = ("--steps", 0, "--blocks", -1, "--micro-batches", 0)
    result = run(*counts, "--seed", -5, "--device", "sundial", "--corpus", nowhere)
    assert result.exit_code == 2
    *lines, device_line, corpus_line = result.stderr.splitlines()
    assert lines == [
        "regrow demo: --steps: 0 is too few. Give 1 or more.",
        "regrow demo: --blocks: -1 is too few. Give 1 or more.",
        "regrow demo: --micro-batches: 0 is too few. Give 1 or more.",
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


def test_the_device_is_one_that_is_there():
    """Rule 19: the CPU always is; what is not is refused with what may be given."""
    assert experiment.find_device("cpu") == CPU
    assert experiment.find_device(None).type in {
        "cpu",
        *(d.type for d in [torch.accelerator.current_accelerator()] if d),
    }
    with pytest.raises(ValueError, match=r"--device: meta is not on this machine\. Give cpu"):
        experiment.find_device("meta")


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
    first, second = text.draw((2, 3, 8), seed=1, device=CPU)
    assert first.tokens.shape == second.targets.shape == (3, 8)
    assert torch.equal(first.tokens + 1, first.targets)
    assert torch.equal(text.draw((2, 3, 8), seed=1, device=CPU)[0].tokens, first.tokens)
    assert not torch.equal(text.draw((2, 3, 8), seed=2, device=CPU)[0].tokens, first.tokens)


def test_bytes_are_what_the_step_allocates():
    """Sizes known beforehand: a kept tensor counts in both figures, a passing one in the peak."""
    before = torch.zeros(1 << 20)

    def step():
        with torch.profiler.record_function("one"):
            kept = torch.zeros(1000)
            torch.zeros(4000)
        with torch.profiler.record_function("two"):
            before.add_(1)
            both = torch.zeros(2000)
            del both, kept

    footprint = memory.measure(step, CPU, forward="one", backward="two")
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
    """Rule 23: private torch names live in a compat module, and a missing one is named in a sentence."""
    monkeypatch.delattr(_backward, "stage_backward_weight")
    with pytest.raises(ImportError) as raised:
        importlib.reload(_compat)
    line = cli._explained(raised.value)
    assert "stage_backward_weight" in line
    assert torch.__version__ in line


def test_a_fresh_process_runs_the_command_quietly():
    """Rule 9: as installed: the table on stdout, and nothing on stderr, from libraries neither."""
    result = in_a_fresh_process(
        "from runpy import run_module; run_module('regrow', run_name='__main__')", "demo", *SMALL
    )
    assert result.returncode == 0, result.stderr
    assert cells(result.stdout)["regrow"][1] == "1"
    assert result.stderr == ""


def test_help_and_version_do_not_import_torch():
    """Rule 20: who asks for help does not wait for a framework."""
    for arguments in (("--help",), ("demo", "--help"), ("--version",)):
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
    assert "Train a small GPT three ways, and compare." in result.stderr


@pytest.mark.parametrize("width", [50, 60, 79, 80, 120])
def test_every_number_stays_whole(width):
    """The numbers are the point."""
    text = shown(table(rows(), width), width)
    assert text.count("2.68385649") == 3
    assert "…" not in text
    for number in ("100.0", "80.0", "40.0", "25.0", "3.50", "1.30"):
        assert number in text


def test_too_few_steps_are_not_timed():
    """A median of cold starts says nothing, and the caption says so."""
    short = rows(times=(None, None, None))
    assert "step time: - for fewer than 5 steps" in caption(short, 1)
    assert "median" in caption(rows(), 5)
    assert "too short to compare step times" in meaning(*short)


def test_the_closing_words_follow_the_numbers():
    """What is no gain is not told as one."""
    good = meaning(*rows())
    assert "a step takes 1.30 times as long as with no checkpoint and its peak is 60% below that" in good
    assert "not" not in good.replace("no checkpoint", "")
    bad = meaning(*rows(times=(1.0, 1.1, 1.2), peaks=(100, 110, 120)))
    assert "its peak is 20% above that of no checkpoint" in bad
    assert "At this size regrow does not lower the peak" in bad
    assert "Its peak is not below that of torch's checkpoint." in bad
    assert "Its step is not faster than that of torch's checkpoint." in bad


def test_a_warm_up_leaves_no_trace():
    """Rule 1: what is warmed up is a copy, so losses, replays and times are those of the steps alone."""
    settings, text = tiny()
    cold, warm = (compare.enroll(settings, VARIANTS) for _ in range(2))
    compare.warm_up(warm, settings, text)
    assert list(compare.train(warm, settings, text)) == list(compare.train(cold, settings, text))
    assert [trainee.model.replays() for trainee in warm] == [trainee.model.replays() for trainee in cold]
    assert [len(trainee.step_s) for trainee in warm] == [2, 2, 2]


def test_a_bar_fits_a_narrow_terminal(monkeypatch):
    """One line, without a loss before there is one."""
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    assert list(progress(console, iter([3.25, 3.0]), 2)) == [3.25, 3.0]
    seen = console.file.getvalue()
    assert "loss" not in seen.partition("2")[0]
    assert "loss 3.000" in seen
    assert "left" in seen
