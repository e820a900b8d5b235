"""`regrow train`: train a small GPT through any schedule. Must never import torch before it runs: help is for now.

Exit status: 0 trained, 1 a rank failed, 2 an option cannot be honoured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regrow.cli import words
from regrow.cli.loading import load
from regrow.cli.options import Options


def train(  # noqa: PLR0913, PLR0917 (an argument is an option)
    schedule: Annotated[str, typer.Option(help=words.SCHEDULE)] = "zbv",
    ranks: Annotated[int | None, typer.Option(help=words.RANKS, show_default=words.FOUND_RANKS)] = None,
    stages: Annotated[int | None, typer.Option(help=words.STAGES, show_default=words.FOUND_STAGES)] = None,
    micro_batches: Annotated[int, typer.Option("--micro-batches", "--microbatches", help=words.MICRO_BATCHES)] = 4,
    prefire: Annotated[str | None, typer.Option(help=words.PREFIRE, show_default=words.FOUND_PREFIRE)] = None,
    retention: Annotated[str, typer.Option(help=words.RETENTION)] = "needed",
    keep: Annotated[str, typer.Option(help=words.KEEP)] = "auto",
    steps: Annotated[int, typer.Option(help=words.STEPS)] = 16,
    blocks: Annotated[int | None, typer.Option(help=words.BLOCKS, show_default="one for each stage")] = None,
    corpus: Annotated[Path | None, typer.Option(help=words.CORPUS, show_default=words.FOUND_CORPUS)] = None,
    device: Annotated[str | None, typer.Option(help=words.DEVICE, show_default=words.FOUND_DEVICE)] = None,
    seed: Annotated[int, typer.Option(help=words.SEED)] = 0,
    trace: Annotated[Path | None, typer.Option(help=words.TRACE, show_default="nothing is recorded")] = None,
) -> None:
    """Train a small GPT on real text through a pipeline of regrow's stages.

    By itself it starts its ranks on this machine. On several machines torchrun starts them, and the command on each
    machine is the same, with the address of the first one:

    \b
        torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \\
            --rdzv-endpoint HOST:PORT -m regrow train

    Rank 0 prints the loss as it goes, and one row of figures at the end. All machines must have the same text: name it
    with --corpus where their Python differs.
    """  # noqa: D301 (backslash b keeps the lines of the command)
    options = Options(
        steps, blocks, micro_batches, ranks, corpus, device, seed, schedule, stages, prefire, retention, keep, trace
    )
    raise typer.Exit(load("regrow.cli.experiment").train(options))
