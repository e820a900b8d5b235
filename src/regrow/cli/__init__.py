"""The command line: `regrow`. Must stay importable without its extra, to say that it is missing."""

from __future__ import annotations

import os
import sys

from regrow.cli.loading import INTERRUPTED, load

_EXTRA = {"rich": "cli", "typer": "cli", "matplotlib": "trace"}


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: with the command's status; 2 if an extra that it needs is not installed, or torch lacks what it
            needs;
            130 after Ctrl-C, whenever it comes.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's library writes to stderr without being asked
    try:
        status = load("regrow.cli.app").run(sys.argv[1:])
    except ImportError as error:
        sys.stderr.write(f"regrow: {_explained(error)}\n")
        status = 2
    except KeyboardInterrupt:  # between an import and typer, which sees to it from there
        status = INTERRUPTED
    raise SystemExit(status)


def _explained(error: ImportError) -> str:
    """The sentence for an import that fails for a reason of the machine; any other is a fault of ours, and raised."""
    missing = error.name
    if missing is None:  # raised by hand, so a sentence already: torch lacks what regrow.pipelining needs
        return str(error)
    extra = _EXTRA.get(missing.partition(".")[0])
    if extra is not None:
        return f"the command line needs {missing}, which is not installed. Run: pip install 'regrow[{extra}]'"
    raise error
