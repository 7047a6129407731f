"""How commands print, fail and exit.

The exit codes of all commands:

- 0: success, and every check passed.
- 1: a check failed, for example because a checkpoint is damaged.
- 2: incorrect usage, or an error because of which the command could not do its work.
- 141: the reader of the output has closed the pipe, as `head` does. Shells report this code for a
  program that was killed by SIGPIPE.

`run` exits with the exit code of its command, and `explain` with a code for the class of the cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.core.text import sanitise

CHECK_FAILED = 1
ERROR = 2

# Width of tables in a file or a pipe, which have no width of their own.
_COLUMNS_WITHOUT_TERMINAL = 150
# An error may quote a traceback, or lines of a log.
_MOST_CHARACTERS_OF_ERROR = 20_000

_STDOUT = 1
_STDERR = 2

# --- Arguments and options that several commands share --------------------------------------------

Json = Annotated[
    bool, typer.Option("--json", help="Print JSON for machines, and nothing else on stdout.")
]
RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, such as runs/last.")
]

# --- For machines ---------------------------------------------------------------------------------

# A copy of the descriptor of stdout, once `keep_stdout_for_json` was called.
_json_descriptors: list[int] = []


def keep_stdout_for_json() -> None:
    """Reserve stdout for `print_json`.

    Everything else that this process or a child process prints goes to stderr.
    """
    _json_descriptors.append(os.dup(_STDOUT))
    os.dup2(_STDERR, _STDOUT)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print one JSON value, on one line if `indent` is None."""
    sys.stdout.flush()
    for descriptor in _json_descriptors:
        os.dup2(descriptor, _STDOUT)
    print(json.dumps(value, indent=indent), flush=True)
    if _json_descriptors:
        os.dup2(_STDERR, _STDOUT)


# --- For people -----------------------------------------------------------------------------------


def console() -> Console:
    """Return where a command prints for people."""
    if sys.stdout.isatty():
        return Console()
    return Console(width=_COLUMNS_WITHOUT_TERMINAL)


@contextlib.contextmanager
def paged() -> Iterator[Console]:
    """Return a context with a console for a long text. On a terminal, it is shown in a pager."""
    out = console()
    if not sys.stdout.isatty() or not sys.stdin.isatty():
        yield out
        return
    # Options of less: F exits if the text fits on one screen, R keeps colors, X keeps the screen.
    os.environ.setdefault("LESS", "FRX")
    with out.pager(styles=True):
        yield out


@contextlib.contextmanager
def working(words: str) -> Iterator[Callable[[str], None]]:
    """Return a context in which stderr shows what the command is doing, if it is a terminal.

    Yields:
        A function that replaces the text.
    """
    if not sys.stderr.isatty():
        yield lambda _words: None
        return
    with Console(stderr=True).status(words) as status:
        yield status.update


# --- Files that a command writes ------------------------------------------------------------------


def check_writable(path: Path) -> None:
    """Check that a file can be written, before spending time on its contents.

    Raises:
        PolicyError: H704 if it cannot.
    """
    problem = ""
    if path.exists() and not path.is_file():
        problem = "is not a regular file"
    elif not os.access(path.absolute().parent, os.W_OK):
        problem = "is in a directory that does not exist or is not writable"
    if problem:
        raise PolicyError(
            f"{str(path)!r} {problem}",
            limit="the output is written to a file",
            fix="name another file.",
            rule="H704",
        )


# --- Errors ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing_clearly(*, as_json: bool) -> Iterator[None]:
    """Return a context in which an error of holdfast or of the system ends the command.

    It is printed as a message, never as a traceback, and the exit code is 2.
    """
    try:
        yield
    except (HoldfastError, OSError) as error:
        print_error(error, as_json=as_json)
        raise typer.Exit(ERROR) from error


def print_error(error: Exception, *, as_json: bool) -> None:
    """Print an error: as JSON on stdout, or as text on stderr."""
    if isinstance(error, OSError):
        error = PolicyError(
            str(error),
            limit="the system refuses it",
            fix="correct it or pass another.",
            rule="H704",
        )
    fields = _error_fields(error)
    if as_json:
        print_json({"error": fields})
        return
    text = f"error: {fields['what']}\nFix: {fields['fix']}"
    if isinstance(error, HoldfastError):
        text = str(error)
    # An error may quote what others have written.
    print(sanitise(text, most=_MOST_CHARACTERS_OF_ERROR, lines=True), file=sys.stderr)


def _error_fields(error: Exception) -> dict[str, str | None]:
    """Return the fields of an error: its rule, what was found, the limit, and the fix."""
    if isinstance(error, HoldfastError):
        return {
            "rule": error.rule,
            "what": error.what,
            "limit": error.limit,
            "fix": error.fix,
        }
    if hasattr(error, "format_message"):
        return _usage_error_fields(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "rule": None,
        "what": f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})",
        "limit": None,
        "fix": "this should have been a clear message: please report it.",
    }


def _usage_error_fields(error: Any) -> dict[str, str | None]:
    """Return the fields of an error that typer raises for incorrect usage."""
    context = getattr(error, "ctx", None)
    command = "holdfast"
    usage = "holdfast COMMAND"
    if context is not None:
        command = context.command_path
        usage = " ".join(context.get_usage().split()).removeprefix("Usage: ")
    return {
        "rule": "H105",
        "what": error.format_message(),
        "limit": f"the usage is `{usage}`",
        "fix": f"see `{command} --help`.",
    }
