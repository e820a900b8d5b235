"""What `--help` says of each option, once for all commands. Must never decide anything."""

from __future__ import annotations

from regrow.cli import options
from regrow.cli.kinds import KINDS

STEPS = "Training steps; step times take 5 or more."
BLOCKS = "Transformer blocks of the model, shared out among the stages."
MICRO_BATCHES = "Micro-batches of a step."
RANKS = "Processes to start, each on a device of its own, or on one thread of the CPU."
FOUND_RANKS = f"{options.RANKS}, or as many as torchrun started"
CORPUS = (
    "Text to train on: a file, or a folder. Of a folder all files count, at any depth, up to 4 MiB; not hidden ones, "
    "and not those with NUL bytes, which are not text."
)
FOUND_CORPUS = "Python's own source"
DEVICE = "Where to train: cpu, or the type of an accelerator."
FOUND_DEVICE = "accelerators if there is one for each rank, else cpu"
SEED = "For the parameters, the text and dropout."
SCHEDULE = f"One of {', '.join(KINDS)}."
STAGES = "Stages on each rank."
FOUND_STAGES = "as many as the schedule takes, 2 where it takes any number"
PREFIRE = f"When replays start before backward asks: {', '.join(options.PREFIRE)}."
FOUND_PREFIRE = "on_wait where the schedule has a place for it"
RETENTION = f"What stays of a replay between dx and dw: {', '.join(options.RETENTION)}."
TRACE = "Record one more step into this file, for `regrow trace show` and Perfetto."
KEEP = f"Which micro-batches are not dropped at all: {', '.join(options.KEEP)}."
