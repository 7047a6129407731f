"""`holdfast`: the entry point, and the list of commands."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from holdfast.cli import checkpoints, demo, explain, loader, presets, quarantine, simulate, trial
from holdfast.cli.output import ERROR
from holdfast.core.version import __version__

app = typer.Typer(
    help="Keeps PyTorch training alive, correct and inside its memory, and says why when it cannot.\n\n"
    "Exit codes: 0 done, 1 a check failed, 2 wrong use or an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.run)
app.command("checkpoints")(checkpoints.run)
app.command("explain")(explain.run)
app.command("presets")(presets.run)
app.command("trial")(trial.run)
app.command("loader")(loader.run)
app.command("quarantine")(quarantine.run)
app.command("simulate")(simulate.run)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    try:
        app()
    except Exception as error:  # noqa: BLE001 - exit code 1 would be an answer
        place = traceback.extract_tb(error.__traceback__)[-1]
        typer.echo(f"error: {type(error).__name__}: {error} ({place.filename}:{place.lineno})", err=True)
        typer.echo("This should have been a clear message: please report it.", err=True)
        sys.exit(ERROR)
