"""`holdfast`: the entry point, and the list of commands."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from holdfast.cli.output import ERROR, leave_when_nobody_reads
from holdfast.core.version import __version__

if TYPE_CHECKING:
    import typer

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
    import typer

    app = typer.Typer(
        help="Keeps PyTorch training alive, correct and inside its memory, and says why when it cannot.\n\n"
        "Exit codes: 0 done, 1 a check failed, 2 wrong use or an error; `run` passes on that of its command, and "
        "`explain` has one for each class of causes.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    option = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version.")

    @app.callback()
    def _options(version: bool = option) -> None:
        pass

    for name in only or COMMANDS:
        module, _, function = COMMANDS[name].partition(":")
        command = getattr(importlib.import_module(f"holdfast.cli.{module}"), function)
        app.command(name, context_settings=_SETTINGS.get(name))(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {__version__}")
        raise SystemExit


def main() -> None:
    """Run the command line."""
    leave_when_nobody_reads()
    try:
        if sys.argv[1:2] == ["run"]:
            from holdfast.cli.supervised import run_if_called_plainly

            run_if_called_plainly(sys.argv[2:])
        make_app(*[name for name in sys.argv[1:2] if name in COMMANDS])()
    except Exception as error:  # noqa: BLE001 - exit code 1 would be an answer
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        print(f"error: {type(error).__name__}: {error} ({place.filename}:{place.lineno})", file=sys.stderr)
        print("This should have been a clear message: please report it.", file=sys.stderr)
        sys.exit(ERROR)
