"""`regrow demo`: train a small GPT three ways and compare. Must never measure, only ask and show.

Exit status: 0 all variants trained alike, 1 they did not, 2 an option cannot be honoured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from regrow.cli import compare, corpus, report
from regrow.cli.compare import Settings, Trainee, Variant
from regrow.cli.corpus import Corpus
from regrow.cli.gpt import Shape
from regrow.cli.report import Row

_SEEDS = range(2**32)


def demo(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 24,
    blocks: Annotated[int, typer.Option(help="Transformer blocks of the model.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 4,
    text: Annotated[
        Path | None,
        typer.Option("--corpus", help="Text to train on: a file, or a folder.", show_default="Python's own source"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to train.", show_default="an accelerator if there is one, else cpu")
    ] = None,
    seed: Annotated[int, typer.Option(help="For the parameters, the text and dropout.")] = 0,
) -> None:
    """Train a small GPT on real text, backward cut in two, three ways: plain, torch's checkpoint, regrow.

    One table shows loss, replays, step time and memory. Exit status 1 says that losses or gradients differ.
    """
    faults = [
        f"--{name}: {value} is too few. Give 1 or more."
        for name, value in (("steps", steps), ("blocks", blocks), ("micro-batches", micro_batches))
        if value < 1
    ]
    if seed not in _SEEDS:
        faults.append(f"--seed: {seed} is out of range. Give 0 to {_SEEDS[-1]}.")
    shape = Shape(n_blocks=blocks)
    try:
        where = find_device(device)
    except ValueError as error:
        faults.append(str(error))
    try:
        loaded = corpus.load(text, length=shape.length)
    except ValueError as error:
        faults.append(str(error))
    if faults:
        _complain(faults)
        raise typer.Exit(2)
    settings = Settings(steps=steps, micro_batches=micro_batches, seed=seed, device=where, shape=shape)
    raise typer.Exit(execute(settings, loaded, compare.VARIANTS))


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
    shape = settings.shape
    console.print(
        f"A GPT of {shape.n_blocks} blocks, width {shape.width}, on {settings.device}: {settings.steps} steps of "
        f"{settings.micro_batches} micro-batches, {settings.pieces} x {shape.length} bytes each, from {loaded.label}."
    )
    trainees = compare.enroll(settings, variants)
    with compare.steady(settings.device):
        for _ in report.progress(console, compare.train(trainees, settings, loaded), settings.steps):
            pass
        faults = compare.disagreements(trainees)  # before the weighing, which overwrites the gradients
        with report.waiting(console, "one more step of each, under the profiler"):
            compare.weigh(trainees, settings, loaded)
    rows = [_row(trainee, trainees[0]) for trainee in trainees]
    console.print(report.table(rows, settings.steps))
    if faults:
        advice = f"Run again; if they stay, report them with --seed {settings.seed} and torch {torch.__version__}."
        _complain([*faults, f"All variants should train alike, so the figures above mean nothing. {advice}"])
        return 1
    console.print(report.meaning(*rows))
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
        typer.echo(f"regrow demo: {fault}", err=True)
