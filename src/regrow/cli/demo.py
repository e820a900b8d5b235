"""`regrow demo`: train a small GPT four ways and compare. Must never import torch before it runs: help is for now.

Exit status: 0 all variants trained alike, 1 they did not, or a rank failed, 2 an option cannot be honoured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regrow.cli import words
from regrow.cli.loading import load
from regrow.cli.options import Options


def demo(
    steps: Annotated[int, typer.Option(help=words.STEPS)] = 16,
    blocks: Annotated[int | None, typer.Option(help=words.BLOCKS, show_default="one for each stage")] = None,
    micro_batches: Annotated[int, typer.Option(help=words.MICRO_BATCHES)] = 4,
    ranks: Annotated[int | None, typer.Option(help=words.RANKS, show_default=words.FOUND_RANKS)] = None,
    corpus: Annotated[Path | None, typer.Option(help=words.CORPUS, show_default=words.FOUND_CORPUS)] = None,
    device: Annotated[str | None, typer.Option(help=words.DEVICE, show_default=words.FOUND_DEVICE)] = None,
    seed: Annotated[int, typer.Option(help=words.SEED)] = 0,
) -> None:
    """Train a small GPT on real text through a zero-bubble pipeline, four ways.

    Without checkpoints, with torch's, and with regrow's: replayed when backward asks, and where a rank would wait.
    Torch's schedule for zero bubbles in V shape runs two stages on each rank and cuts backward into dx and dw.

    One table shows loss, replays, step time, idle time and memory. Exit status 1 says that losses or gradients differ,
    or that a rank failed.
    """
    options = Options(steps, blocks, micro_batches, ranks, corpus, device, seed)
    raise typer.Exit(load("regrow.cli.experiment").demo(options))
