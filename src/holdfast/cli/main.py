"""`holdfast`: the entry point, and the list of commands."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any, cast

from holdfast.core.version import __version__

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "run": "run:run",
    "watch": "views:watch",
    "attach": "attach:run",
    "explain": "explain:run",
    "report": "views:report",
    "events": "events:run",
    "metrics": "views:metrics",
    "plan": "plan:run",
    "compare": "views:compare",
    "checkpoints": "guard_directory:checkpoints",
    "quarantine": "guard_directory:quarantine",
    "doctor": "doctor:run",
    "chaos": "chaos:run",
}
"""Of each command the module and the function."""
_COMPLETING = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # in which a shell says what is typed so far
_READER_GONE = 141  # see ``output``
_SETTINGS = {
    name: {"allow_interspersed_args": False} for name in ("run", "chaos")
}  # what follows the command's name is the command's


def make_app(*only: str) -> typer.Typer:
    """Return the command line, with these commands or with all.

    Importing all takes longer than most of them.
    """
    import typer

    app = typer.Typer(
        help=(
            "Keeps PyTorch training alive, correct and inside its memory, and says why when it"
            " cannot.\n\nExit codes: 0 done, 1 a check failed, 2 wrong use or an error; `run`"
            " passes on that of its command, and `explain` has one for each class of causes."
        ),
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    option = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    )

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


class _Stream(io.FileIO):
    """A standard stream whose reader may leave."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            # What is still in a buffer goes there, without a word at the end
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise SystemExit(_READER_GONE) from None  # no `Exception`, which many places catch


def _leave_when_nobody_reads() -> None:
    """Let this process end quietly once a reader of its output has closed the pipe.

    The signal itself stays off: it would also end a command when a connection or a child of its own
        goes.
    """
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is None:
            continue
        old.flush()
        raw = _Stream(old.fileno(), "w", closefd=False)
        buffered = raw if old.write_through else io.BufferedWriter(raw)
        new = io.TextIOWrapper(
            cast("Any", buffered),
            old.encoding,
            old.errors,
            line_buffering=old.line_buffering,
            write_through=old.write_through,
        )
        setattr(sys, name, new)


def main() -> None:
    """Run the command line."""
    _leave_when_nobody_reads()
    words = sys.argv[1:]
    as_json = "--json" in (words[: words.index("--")] if "--" in words else words)
    try:
        if words[:1] == ["run"]:
            from holdfast.cli.supervised import run_if_called_plainly

            run_if_called_plainly(words[1:])
        elif as_json:
            from holdfast.cli import output

            output.keep_stdout_for_json()
        typed = next(
            (os.environ[name].split()[1:] for name in _COMPLETING if name in os.environ), words
        )
        status = make_app(*[name for name in typed[:1] if name in COMMANDS])(
            words or ["--help"], standalone_mode=False
        )
    except Exception as error:  # noqa: BLE001 - exit code 1 would be an answer
        from holdfast.cli.output import ERROR, print_error

        print_error(error, as_json=as_json)
        status = ERROR
    sys.exit(status)
