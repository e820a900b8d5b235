"""From options to ranks at work: checks all options, then launches, unless it was launched. Must never train."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from regrow.cli import corpus, work
from regrow.cli.complaining import complain
from regrow.cli.corpus import Corpus
from regrow.cli.counts import counted
from regrow.cli.gpt import Shape
from regrow.cli.launching import RankError, Started, launch, started
from regrow.cli.options import RANKS, Options
from regrow.cli.settings import Settings


def demo(options: Options) -> int:
    """Compare the variants.

    Returns:
        The exit status: 2 where an option cannot be honoured, with a line on stderr for each such option; 1 if variants
        disagree, or a rank failed.
    """
    return _run("regrow demo", options, work.compare_variants)


def train(options: Options) -> int:
    """Train with regrow's stages.

    Returns:
        The exit status, as of `demo`.
    """
    prefire = options.prefire or ("on_wait" if options.kind().has_waits else "off")
    attached = {"prefire": prefire, "retention": options.retention, "keep": options.keep}
    return _run("regrow train", options, work.train, attached, options.trace)


def find_device(name: str | None, n_ranks: int) -> str:
    """The type of the devices to train on.

    Args:
        name: as torch names their type. None is the accelerator if there is one for each rank, else the CPU.
        n_ranks: how many there are on this machine.

    Raises:
        ValueError: torch does not know it, or this machine does not have enough of it.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    n_devices = torch.accelerator.device_count() if accelerator is not None else 0
    enough = accelerator is not None and n_devices >= n_ranks
    if name is None:
        return accelerator.type if accelerator is not None and enough else "cpu"
    here = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    if name not in here:
        raise ValueError(f"--device: {name} is not on this machine. Give {' or '.join(here)}.")
    if name != "cpu" and not enough:
        raise ValueError(
            f"--device: {counted(n_ranks, 'rank')} need as many devices, this machine has {n_devices} of type {name}. "
            "Give cpu, or fewer --ranks."
        )
    return name


def _run(command: str, options: Options, task: Callable[..., int], *arguments: Any) -> int:
    ours = started()
    n_ranks = ours.n_ranks if ours else options.ranks or RANKS
    faults = options.faults(ours.n_ranks if ours else None)
    blocks = options.blocks or max(1, n_ranks * options.n_stages())
    shape = Shape(n_blocks=blocks)
    try:
        device_type = find_device(options.device, ours.n_here if ours else n_ranks)
    except ValueError as error:
        faults.append(str(error))
    try:
        loaded = corpus.load(options.corpus, length=shape.length)
    except ValueError as error:
        faults.append(str(error))
    if faults:
        if ours is None or ours.rank_here == 0:
            complain(command, faults)
        return 2
    settings = Settings(
        command=command,
        steps=options.steps,
        micro_batches=options.micro_batches,
        seed=options.seed,
        n_ranks=n_ranks,
        schedule=options.schedule,
        n_stages=options.n_stages(),
        device_type=device_type,
        corpus=options.corpus,
        shape=shape,
    )
    if ours is None or ours.rank == 0:
        _console().print(_announcement(settings, loaded))
    return _at_work(ours, settings, task, *arguments)


def _at_work(ours: Started | None, settings: Settings, task: Callable[..., int], *arguments: Any) -> int:
    if ours is not None:
        return task(settings, *arguments, False)
    try:
        return int(launch(settings.n_ranks, task, settings, *arguments, True))
    except RankError as error:
        sys.stderr.write(error.traceback)
        complain(settings.command, [f"{error}. The other ranks were ended."])
        return 1
    finally:
        _console().show_cursor()  # which a rank that ended under a bar has left hidden


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, markup=False)


def _announcement(settings: Settings, loaded: Corpus) -> str:
    shape = settings.shape
    return (
        f"A GPT of {counted(shape.n_blocks, 'block')}, width {shape.width}, "
        f"in {counted(settings.n_stages_in_all(), 'stage')} on {counted(settings.n_ranks, 'rank')} "
        f"({settings.device_type}), schedule {settings.schedule}: "
        f"{counted(settings.steps, 'step')} of {counted(settings.micro_batches, 'micro-batch', 'micro-batches')}. "
        f"A micro-batch is {counted(settings.pieces, 'sequence')} of {counted(shape.length, 'byte')} "
        f"from {loaded.label}."
    )
