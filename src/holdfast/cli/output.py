"""How commands print, fail and exit: one way for all of them.

0  done, and every check held
1  done, and a check failed: a damaged checkpoint, a broken promise
2  wrong use, or an error that kept the command from its work
141  whoever read the output has closed it (`| head`): as a shell says it of any program that
    SIGPIPE ended
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
_WIDTH = 150  # of tables in a file or a pipe, which have no width

Json = Annotated[
    bool, typer.Option("--json", help="Print JSON for machines, and nothing else on stdout.")
]
_json_descriptors: list[int] = []


def console() -> Console:
    """Return where a command prints for people."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def print_json(value: Any) -> None:
    """Print one JSON value."""
    sys.stdout.flush()
    for descriptor in _json_descriptors:
        os.dup2(descriptor, 1)
    print(json.dumps(value, indent=2), flush=True)
    if _json_descriptors:
        os.dup2(2, 1)


def keep_stdout_for_json() -> None:
    """Let nothing but `print_json` write to stdout.

    What else this process or a child of it prints goes to stderr.
    """
    _json_descriptors.append(os.dup(1))
    os.dup2(2, 1)


@contextlib.contextmanager
def paged() -> Iterator[Console]:
    """Give a console for a long text: on a terminal it goes through the pager of the system."""
    out = console()
    if sys.stdout.isatty() and sys.stdin.isatty():
        os.environ.setdefault("LESS", "FRX")  # colours, and no pager for what fits the screen
        with out.pager(styles=True):
            yield out
    else:
        yield out


@contextlib.contextmanager
def working(words: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal, on stderr, that something is going on.

    What is yielded takes other words for it.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with Console(stderr=True).status(words) as status:
        yield status.update


RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/last.")
]


@contextlib.contextmanager
def failing_clearly(*, as_json: bool) -> Iterator[None]:
    """Turn an error of holdfast or of the system into a message and exit code 2, never a
    traceback.
    """
    try:
        yield
    except (HoldfastError, OSError) as error:
        print_error(error, as_json=as_json)
        raise typer.Exit(ERROR) from error


def print_error(error: Exception, *, as_json: bool) -> None:
    """Print an error: as JSON on stdout or as text on stderr."""
    facts = {"rule": None, "what": str(error), "limit": None, "fix": None}
    if isinstance(error, OSError):
        error = PolicyError(
            str(error),
            limit="the system refuses it",
            fix="correct it or pass another.",
            rule="H704",
        )
    if isinstance(error, HoldfastError):
        facts = {name: getattr(error, name) for name in facts}
    elif hasattr(error, "format_message"):  # wrong use, as typer finds it
        context = getattr(error, "ctx", None)
        path, usage = (
            (context.command_path, context.get_usage())
            if context
            else ("holdfast", "holdfast COMMAND")
        )
        limit, fix = (
            " ".join(usage.split()).removeprefix("Usage: "),
            f"`{path} --help` says what it takes.",
        )
        facts = {
            "rule": "H105",
            "what": error.format_message(),
            "limit": f"it is used as `{limit}`",
            "fix": fix,
        }
    else:
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        facts |= {"what": what, "fix": "this should have been a clear message: please report it."}
    if as_json:
        print_json({"error": facts})
        return
    fix = f"\nFix: {facts['fix']}" if facts["fix"] else ""
    text = str(error) if isinstance(error, HoldfastError) else f"error: {facts['what']}{fix}"
    # It may quote what others have written
    print(sanitise(text, most=20_000, lines=True), file=sys.stderr)
