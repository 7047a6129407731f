"""`holdfast`: the entry point, and the list of commands."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Annotated

import typer

from holdfast.cli.output import ERROR, leave_when_nobody_reads
from holdfast.core.version import __version__

COMMANDS = {
    "run": "run:run", "watch": "views:watch", "explain": "explain:run", "report": "views:report",
    "events": "events:run", "metrics": "views:metrics", "plan": "plan:run", "calibrate": "calibrate:run",
    "demo": "demo:run", "checkpoints": "guard_directory:checkpoints", "presets": "presets:run",
    "loader": "loader:run", "quarantine": "guard_directory:quarantine", "simulate": "simulate:run",
}  # fmt: skip
"""Of each command the module and the function."""
_SETTINGS = {"run": {"allow_interspersed_args": False}}  # what follows the command's name is the command's


def make_app(*only: str) -> typer.Typer:
    """Return the command line, with these commands or with all: importing all takes longer than most of them."""
    app = typer.Typer(
        help="Keeps PyTorch training alive, correct and inside its memory, and says why when it cannot.\n\n"
        "Exit codes: 0 done, 1 a check failed, 2 wrong use or an error; `run` passes on that of its command, and "
        "`explain` has one for each class of causes.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name in only or COMMANDS:
        module, _, function = COMMANDS[name].partition(":")
        command = getattr(importlib.import_module(f"holdfast.cli.{module}"), function)
        app.command(name, context_settings=_SETTINGS.get(name))(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    leave_when_nobody_reads()
    try:
        make_app(*[name for name in sys.argv[1:2] if name in COMMANDS])()
    except Exception as error:  # noqa: BLE001 - exit code 1 would be an answer
        place = traceback.extract_tb(error.__traceback__)[-1]
        typer.echo(f"error: {type(error).__name__}: {error} ({place.filename}:{place.lineno})", err=True)
        typer.echo("This should have been a clear message: please report it.", err=True)
        sys.exit(ERROR)
