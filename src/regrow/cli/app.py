"""The table of commands: what `regrow` can be asked. Must never hold the work of a command.

Commands stand in files of their own, one each, and are entered here by name.
"""

from __future__ import annotations

import typer

from regrow.cli.demo import demo

app = typer.Typer(
    name="regrow",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals are tensors
)


@app.callback()
def regrow() -> None:
    """Activation recomputation that a scheduler can control, for PyTorch."""  # keeps `demo` a word: it stands alone


app.command()(demo)
