"""The table of commands: what `regrow` can be asked. Must never hold the work of a command, nor import torch.

Commands stand in files of their own, one each, and are entered here by name. Help, version and errors are plain lines:
one style, whoever finds the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

import typer

from regrow import __version__
from regrow.cli.demo import demo
from regrow.cli.doctor import doctor
from regrow.cli.trace import trace
from regrow.cli.train import train

# What all faults of a command line derive from. typer exports no name for it: older ones use click's, newer their own.
_Fault = cast("type[typer.BadParameter]", typer.BadParameter.__base__)

app = typer.Typer(
    name="regrow",
    add_completion=False,
    rich_markup_mode=None,  # plain text, which costs no import
    pretty_exceptions_enable=False,
)


def run(arguments: Sequence[str]) -> int:
    """Run a command.

    Args:
        arguments: the command and its options, as words.

    Returns:
        The exit status: 2 where the arguments cannot be honoured, 130 after Ctrl-C.
    """
    try:
        return app(list(arguments), prog_name="regrow", standalone_mode=False) or 0
    except _Fault as fault:
        where = fault.ctx.command_path if fault.ctx else "regrow"
        typer.echo(f"{where}: {_sentence(fault)} See {where} --help.", err=True)
        return fault.exit_code


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regrow {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def regrow(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Activation recomputation that a scheduler can control, for PyTorch."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


app.command(short_help="Train a small GPT through a pipeline four ways, and compare.")(demo)
app.command(short_help="Train a small GPT through a pipeline of any schedule.")(train)
app.command(short_help="Say what this installation has and can do, for bug reports.")(doctor)
app.add_typer(trace, name="trace")


def _sentence(fault: typer.BadParameter) -> str:
    parameter = getattr(fault, "param", None)
    text = fault.format_message() if parameter is None else f"{parameter.opts[0]}: {fault.message}"
    return text if text.endswith((".", "?")) else f"{text}."
