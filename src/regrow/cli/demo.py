"""`regrow demo`: train a small GPT three ways and compare. Must never import torch before it runs: help is for now.

Exit status: 0 all variants trained alike, 1 they did not, 2 an option cannot be honoured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regrow.cli.loading import load
from regrow.cli.options import Options


def demo(
    steps: Annotated[int, typer.Option(help="Training steps; step times take 5 or more.")] = 24,
    blocks: Annotated[int, typer.Option(help="Transformer blocks of the model.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 4,
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="Text to train on: a file, or a folder. Of a folder all files count, at any depth, up to 4 MiB; not "
            "hidden ones, and not those with NUL bytes, which are not text.",
            show_default="Python's own source",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to train.", show_default="an accelerator if there is one, else cpu")
    ] = None,
    seed: Annotated[int, typer.Option(help="For the parameters, the text and dropout.")] = 0,
) -> None:
    """Train a small GPT on real text, backward cut in two, three ways: plain, torch's checkpoint, regrow.

    One table shows loss, replays, step time and memory. Exit status 1 says that losses or gradients differ.
    """
    options = Options(steps, blocks, micro_batches, corpus, device, seed)
    raise typer.Exit(load("regrow.cli.experiment").run(options))
