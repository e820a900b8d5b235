"""What each rank does, from the text to the last line, which rank 0 prints. Must never measure, only ask and show."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from regrow.cli import compare, corpus
from regrow.cli.complaining import complain
from regrow.cli.figures import Row, row
from regrow.cli.meaning import meaning
from regrow.cli.progress import progress, waiting
from regrow.cli.rank import Rank, joined
from regrow.cli.report import caption, table
from regrow.cli.settings import Settings
from regrow.cli.trainee import Seen, Trainee
from regrow.cli.variants import VARIANTS, Variant, regrow_block
from regrow.pipelining import PipelineStage
from regrow.trace.timeline import Timeline


def compare_variants(settings: Settings, loopback: bool) -> int:
    """Be a rank of `regrow demo`.

    Returns:
        The exit status, on every rank: 1 if the variants disagree anywhere.
    """
    with joined(settings.device_type, loopback=loopback) as rank:
        return compare_on(rank, settings, VARIANTS)


def train(settings: Settings, attached: dict[str, Any], trace: Path | None, loopback: bool) -> int:
    """Be a rank of `regrow train`.

    Args:
        settings: what is trained, checked.
        attached: options of `regrow.pipelining.attach`.
        trace: where to write what one more step does; None: nowhere.
        loopback: whether all ranks are on this machine.

    Returns:
        The exit status, on every rank.
    """
    variant = Variant(settings.schedule, regrow_block, PipelineStage, attached)
    with joined(settings.device_type, loopback=loopback) as rank:
        return train_on(rank, settings, variant, trace)


def compare_on(rank: Rank, settings: Settings, variants: Sequence[Variant]) -> int:
    """Train all variants, weigh them, print on rank 0.

    Args:
        rank: this process.
        settings: what is trained, checked.
        variants: no checkpointing, torch's, regrow's lazily and prefired, in this order.

    Returns:
        The exit status, on every rank.
    """
    console = _console()
    trainees, mine = _trained(rank, settings, variants, console)
    by_rank = rank.gather(([trainee.seen for trainee in trainees], mine))
    rows = _rows(variants, [seen for seen, _ in by_rank])
    faults = [f"rank {index}: {fault}" for index, (_, found) in enumerate(by_rank) for fault in found]
    if rank.index == 0:
        _show(console, rows, settings)
    if rank.index == 0 and faults:
        advice = f"Run again; if they stay, report them with --seed {settings.seed} and torch {torch.__version__}."
        last = f"All variants should train alike, so the figures above mean nothing. {advice}"
        complain(settings.command, [*faults, last])
    elif rank.index == 0:
        console.print(meaning(*rows))
    return 1 if faults else 0


def train_on(rank: Rank, settings: Settings, variant: Variant, trace: Path | None = None) -> int:
    """Train one variant, print its row on rank 0, and write what one more step of all ranks does.

    Returns:
        The exit status, on every rank.
    """
    console = _console()
    trainees, _ = _trained(rank, settings, [variant], console)
    recorded = None if trace is None else rank.gather(compare.record(trainees[0], settings, rank))
    rows = _rows([variant], rank.gather([trainee.seen for trainee in trainees]))
    if rank.index == 0:
        _show(console, rows, settings)
        if trace is not None and recorded is not None:
            title = (
                f"{settings.command}: one step, schedule {settings.schedule}, {settings.micro_batches} micro-batches"
            )
            trace.write_text(Timeline.of(recorded, title).to_json(), encoding="utf-8")
            console.print(f"One more step was recorded. Draw it: regrow trace show {trace}")
    return 0


def _trained(
    rank: Rank, settings: Settings, variants: Sequence[Variant], console: Console
) -> tuple[list[Trainee], list[str]]:
    """The variants after all steps, and where they disagree on this rank."""
    text = corpus.load(settings.corpus, length=settings.shape.length)
    rank.agree("options or another text", (replace(settings, corpus=None), text.fingerprint()))
    trainees = [Trainee(variant, settings, rank) for variant in variants]
    compare.warm_up(trainees, settings, text, rank)
    losses: Iterable[float] = compare.train(trainees, settings, text, rank)
    for _ in progress(console, losses, settings.steps) if rank.index == 0 else losses:
        pass
    faults = compare.disagreements(trainees)  # before the weighing, which overwrites the gradients
    with waiting(console, "two more steps, under the profiler") if rank.index == 0 else nullcontext():
        compare.weigh(trainees, settings, text, rank)
    return trainees, faults


def _rows(variants: Sequence[Variant], by_rank: Sequence[Sequence[Seen]]) -> list[Row]:
    by_variant = list(zip(*by_rank, strict=True))
    reference = by_variant[0] if len(variants) > 1 else None
    return [row(variant.name, seen, reference) for variant, seen in zip(variants, by_variant, strict=True)]


def _show(console: Console, rows: Sequence[Row], settings: Settings) -> None:
    console.print(table(rows, console.width))
    console.print(caption(rows, settings.steps))


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, markup=False)
