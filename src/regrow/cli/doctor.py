"""`regrow doctor`: what this installation has and can do. Must never fail where torch does: that is what it is for.

Exit status: 0 checkpoints work here, 1 they do not.
"""

from __future__ import annotations

from typing import Annotated

import typer

from regrow.cli.loading import load


def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="As JSON, with every private name of torch that is used.")
    ] = False,
) -> None:
    """Say what this installation has and can do. Paste it into a bug report.

    Versions, devices, the private names of torch that regrow needs, what is therefore available, and a checkpoint that
    is run on each device and compared with plain autograd, bit for bit. Nothing is sent anywhere.
    """
    raise typer.Exit(load("regrow.cli.checkup").run(as_json=json))
