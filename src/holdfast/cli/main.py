"""`holdfast`: the entry point, and the table of commands.

Imports in this module slow down every command, so the module of a command is imported only when
that command is called.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from holdfast.cli.examples import examples_of
from holdfast.core.version import __version__

if TYPE_CHECKING:
    import typer

# The module (in this package) and function of each command, in the order in which ``--help`` lists
# the commands.
COMMANDS = {
    "run": "run:run",
    "watch": "views:watch",
    "attach": "attach:run",
    "save": "requests:save",
    "stop": "requests:stop",
    "explain": "explain:run",
    "report": "views:report",
    "events": "events:run",
    "metrics": "views:metrics",
    "plan": "plan:run",
    "compare": "views:compare",
    "checkpoints": "checkpoints:run",
    "quarantine": "quarantine:run",
    "doctor": "doctor:run",
    "chaos": "chaos:run",
}
# Commands that run another command. All options after the name of that other command belong to it.
_WRAPPING_COMMANDS = ("run", "chaos")
# Environment variables in which a shell passes an incomplete command line to be completed.
_COMPLETION_VARIABLES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
# Exit code if the reader of the output closes the pipe: 128 + SIGPIPE, as a shell reports it.
_READER_GONE = 141

_HELP = (
    "Keeps PyTorch training alive, correct and inside its memory, and says why when it cannot.\n\n"
    "Exit codes: 0 success, 1 a check failed, 2 incorrect usage or an error. `run` exits with the"
    " exit code of its command, and `explain` with a code for the class of the cause."
)


def main() -> None:
    """Parse the command line, run the command, and exit with its exit code."""
    _exit_when_output_is_closed()
    words = sys.argv[1:]
    as_json = _asks_for_json(words)
    try:
        if words[:1] == ["run"]:
            from holdfast.cli.supervised import run_if_called_plainly

            # If this function can parse the options without typer, it runs the command and exits.
            run_if_called_plainly(words[1:])
        if as_json:
            from holdfast.cli import output

            output.keep_stdout_for_json()
        app = make_app(*_command_named(words))
        status = app(words or ["--help"], standalone_mode=False)
    # Without this handler, an exception would cause exit code 1, which means that a check failed.
    except Exception as error:  # noqa: BLE001
        from holdfast.cli.output import ERROR, print_error

        print_error(error, as_json=as_json)
        status = ERROR
    sys.exit(status)


def _asks_for_json(words: Sequence[str]) -> bool:
    """Return whether ``--json`` is passed to holdfast itself, not to the command after ``--``."""
    if "--" in words:
        words = words[: words.index("--")]
    return "--json" in words


def _command_named(words: Sequence[str]) -> Sequence[str]:
    """Return a list that contains the name of the command to run or to complete, if it exists."""
    for name in _COMPLETION_VARIABLES:
        if name in os.environ:
            words = os.environ[name].split()[1:]
            break
    return [name for name in words[:1] if name in COMMANDS]


def make_app(*only: str) -> typer.Typer:
    """Create the typer application.

    Args:
        *only: Names of the commands to include; by default all, but importing all of them takes
            longer than running most commands.
    """
    import typer

    app = typer.Typer(
        help=_HELP,
        # Plain help without boxes: typer's own style cuts values off and wraps sentences twice.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    version_option = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    )

    @app.callback()
    def _options(version: bool = version_option) -> None:
        pass

    for name in only or COMMANDS:
        module_name, _, function_name = COMMANDS[name].partition(":")
        module = importlib.import_module(f"holdfast.cli.{module_name}")
        settings = None
        if name in _WRAPPING_COMMANDS:
            settings = {"allow_interspersed_args": False}
        command = app.command(name, context_settings=settings, epilog=examples_of(name))
        command(getattr(module, function_name))
    return app


def _print_version(requested: bool) -> None:
    if requested:
        print(f"holdfast {__version__}")
        raise SystemExit


# --- Closed pipes ---------------------------------------------------------------------------------


def _exit_when_output_is_closed() -> None:
    """Make this process exit quietly when the reader of its output closes the pipe.

    SIGPIPE stays ignored, because it would also kill holdfast when it writes to a closed connection
    or to a child process that has exited.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, _exiting_stream(stream))


def _exiting_stream(stream: Any) -> io.TextIOWrapper:
    """Return a copy of a text stream that exits the process if it writes to a closed pipe.

    The copy has the file descriptor, encoding and buffering of the original.
    """
    stream.flush()
    raw = _ExitingFile(stream.fileno(), "w", closefd=False)
    buffer: Any = raw
    if not stream.write_through:
        buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(
        cast("Any", buffer),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _ExitingFile(io.FileIO):
    """A file that exits the process when it writes to a pipe that the reader has closed."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            # Python flushes its buffers again at exit. Redirect them to /dev/null, so that this
            # does not fail a second time.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            # `except Exception` does not catch SystemExit, so no caller can suppress the exit by
            # mistake.
            raise SystemExit(_READER_GONE) from None
