"""What `regrow demo` does, from checked options to the last line. Must never measure, only ask and show."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from rich.console import Console

from regrow.cli import compare, corpus
from regrow.cli.compare import Settings, Trainee, Variant
from regrow.cli.corpus import Corpus
from regrow.cli.counts import counted
from regrow.cli.gpt import Shape
from regrow.cli.meaning import meaning
from regrow.cli.options import Options
from regrow.cli.progress import progress, waiting
from regrow.cli.report import Row, caption, table


def run(options: Options) -> int:
    """Check the options, all of them, then train.

    Returns:
        The exit status: 2 where an option cannot be honoured, with a line on stderr for each such option.
    """
    faults = options.faults()
    shape = Shape(n_blocks=max(options.blocks, 1))
    try:
        device = find_device(options.device)
    except ValueError as error:
        faults.append(str(error))
    try:
        loaded = corpus.load(options.corpus, length=shape.length)
    except ValueError as error:
        faults.append(str(error))
    if faults:
        _complain(faults)
        return 2
    settings = Settings(options.steps, options.micro_batches, options.seed, device, shape)
    return execute(settings, loaded, compare.VARIANTS)


def execute(settings: Settings, loaded: Corpus, variants: Sequence[Variant]) -> int:
    """Train, weigh, print.

    Args:
        settings: what is trained, checked.
        loaded: the text.
        variants: no checkpointing, torch's and regrow's, in this order.

    Returns:
        The exit status: 1 if the variants disagree.
    """
    console = Console(file=sys.stdout, highlight=False, markup=False)
    console.print(_announcement(settings, loaded))
    trainees = compare.enroll(settings, variants)
    with compare.steady(settings.device):
        compare.warm_up(trainees, settings, loaded)
        for _ in progress(console, compare.train(trainees, settings, loaded), settings.steps):
            pass
        faults = compare.disagreements(trainees)  # before the weighing, which overwrites the gradients
        with waiting(console, "one more step of each, under the profiler"):
            compare.weigh(trainees, settings, loaded)
    rows = [_row(trainee, trainees[0]) for trainee in trainees]
    console.print(table(rows, console.width))
    console.print(caption(rows, settings.steps))
    if faults:
        advice = f"Run again; if they stay, report them with --seed {settings.seed} and torch {torch.__version__}."
        _complain([*faults, f"All variants should train alike, so the figures above mean nothing. {advice}"])
        return 1
    console.print(meaning(*rows))
    return 0


def find_device(name: str | None) -> torch.device:
    """The device to train on.

    Args:
        name: as torch names devices. None is the accelerator if there is one, else the CPU.

    Raises:
        ValueError: torch does not know it, or this machine does not have it.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return accelerator or torch.device("cpu")
    here = ["cpu"]
    if accelerator is not None:
        here += [accelerator.type, *(f"{accelerator.type}:{n}" for n in range(torch.accelerator.device_count()))]
    if name not in here:
        raise ValueError(f"--device: {name} is not on this machine. Give {' or '.join(here)}.")
    return torch.device(name)


def _announcement(settings: Settings, loaded: Corpus) -> str:
    shape = settings.shape
    return (
        f"A GPT of {counted(shape.n_blocks, 'block')}, width {shape.width}, on {settings.device}: "
        f"{counted(settings.steps, 'step')} of {counted(settings.micro_batches, 'micro-batch', 'micro-batches')}. "
        f"A micro-batch is {counted(settings.pieces, 'sequence')} of {counted(shape.length, 'byte')} "
        f"from {loaded.label}."
    )


def _row(trainee: Trainee, reference: Trainee) -> Row:
    return Row(
        name=trainee.variant.name,
        loss=trainee.losses[-1].item(),
        replays=trainee.model.replays(),
        time_ratio=compare.time_ratio(trainee, reference),
        footprint=trainee.footprint,
    )


def _complain(faults: list[str]) -> None:
    for fault in faults:
        sys.stderr.write(f"regrow demo: {fault}\n")
