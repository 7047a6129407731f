"""Printing, error handling and exit codes of all commands.

All commands use these exit codes:

- 0: success, and every check passed.
- 1: a check failed, for example because a checkpoint is damaged.
- 2: incorrect usage, or an error that kept the command from finishing.
- 141: the reader of the output closed the pipe, as `head` does. Shells report this code for a
  program that was killed by SIGPIPE.

Two commands have further exit codes: `run` exits with the exit code of its command, and `explain`
with a code for the class of the cause.
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

# Width of tables that are written to a file or a pipe instead of a terminal.
_COLUMNS_WITHOUT_TERMINAL = 150
# Maximum length of an error message, which may quote a traceback or lines of a log.
_MOST_CHARACTERS_OF_ERROR = 20_000

_STDOUT = 1
_STDERR = 2

# --- Arguments and options that several commands share --------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, such as runs/last.")
]

# --- JSON output ----------------------------------------------------------------------------------

# Contains a duplicate of stdout's file descriptor once `keep_stdout_for_json` has been called.
_json_descriptors: list[int] = []


def keep_stdout_for_json() -> None:
    """Reserve stdout for the output of `print_json`.

    All other output of this process and its child processes goes to stderr.
    """
    _json_descriptors.append(os.dup(_STDOUT))
    os.dup2(_STDERR, _STDOUT)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON, on a single line if `indent` is None."""
    sys.stdout.flush()
    for descriptor in _json_descriptors:
        os.dup2(descriptor, _STDOUT)
    print(json.dumps(value, indent=indent), flush=True)
    if _json_descriptors:
        os.dup2(_STDERR, _STDOUT)


# --- Text output ----------------------------------------------------------------------------------


def console() -> Console:
    """Return a rich console for stdout, with a fixed width if stdout is not a terminal."""
    if sys.stdout.isatty():
        return Console()
    return Console(width=_COLUMNS_WITHOUT_TERMINAL)


@contextlib.contextmanager
def paged() -> Iterator[Console]:
    """Context manager that yields a console for long text, shown in a pager on a terminal."""
    out = console()
    if not sys.stdout.isatty() or not sys.stdin.isatty():
        yield out
        return
    # Options of less: F exits if the text fits on one screen, R shows colors, X does not clear the
    # screen.
    os.environ.setdefault("LESS", "FRX")
    with out.pager(styles=True):
        yield out


@contextlib.contextmanager
def working(words: str) -> Iterator[Callable[[str], None]]:
    """Context manager that shows a spinner and a message on stderr, if stderr is a terminal.

    Yields:
        A function that replaces the message.
    """
    if not sys.stderr.isatty():
        yield lambda _words: None
        return
    with Console(stderr=True).status(words) as status:
        yield status.update


# --- Output files ---------------------------------------------------------------------------------


def check_writable(path: Path) -> None:
    """Check that an output file can be written, before spending time on its contents.

    Raises:
        PolicyError: H704 if the file cannot be written.
    """
    problem = ""
    if path.exists() and not path.is_file():
        problem = "is not a regular file"
    elif not os.access(path.absolute().parent, os.W_OK):
        problem = "is in a directory that does not exist or is not writable"
    if problem:
        raise PolicyError(
            f"{str(path)!r} {problem}",
            limit="the output must be a file in a writable directory",
            fix="choose another path.",
            rule="H704",
        )


# --- Errors ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing_clearly(*, as_json: bool) -> Iterator[None]:
    """Context manager that ends the command if a `HoldfastError` or an `OSError` is raised.

    The error is printed as a message without a traceback, and the exit code is 2.
    """
    try:
        yield
    except (HoldfastError, OSError) as error:
        print_error(error, as_json=as_json)
        raise typer.Exit(ERROR) from error


def print_error(error: Exception, *, as_json: bool) -> None:
    """Print an error as JSON on stdout or as text on stderr."""
    if isinstance(error, OSError):
        error = PolicyError(
            str(error),
            limit="the operating system refused the operation",
            fix="solve this problem, or pass another path.",
            rule="H704",
        )
    fields = _error_fields(error)
    if as_json:
        print_json({"error": fields})
        return
    text = f"error: {fields['what']}\nFix: {fields['fix']}"
    if isinstance(error, HoldfastError):
        text = str(error)
    # An error may quote text from other sources, such as a log.
    print(sanitise(text, most=_MOST_CHARACTERS_OF_ERROR, lines=True), file=sys.stderr)


def _error_fields(error: Exception) -> dict[str, str | None]:
    """Return the fields of an error: the rule, what happened, the limit and the fix."""
    if isinstance(error, HoldfastError):
        return {
            "rule": error.rule,
            "what": error.what,
            "limit": error.limit,
            "fix": error.fix,
        }
    if hasattr(error, "format_message"):
        return _usage_error_fields(error)
    # The last frame is the one that raised the error.
    place = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "rule": None,
        "what": f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})",
        "limit": None,
        "fix": "this is a bug in holdfast; please report it.",
    }


def _usage_error_fields(error: Any) -> dict[str, str | None]:
    """Return the same fields as `_error_fields` for a usage error from typer."""
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
