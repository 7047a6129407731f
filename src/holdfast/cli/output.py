"""How commands print, fail and exit: one way for all of them.

0  done, and every check held
1  done, and a check failed: a damaged checkpoint, a broken promise
2  wrong use, or an error that kept the command from its work
141  whoever read the output has closed it (`| head`): as a shell says it of any program that SIGPIPE ended
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from holdfast.core.errors import HoldfastError

CHECK_FAILED = 1
ERROR = 2
_WIDTH = 150  # of tables in a file or a pipe, which have no width

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def console() -> Console:
    """Return where a command prints for people."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def print_json(value: Any) -> None:
    """Print one JSON value."""
    typer.echo(json.dumps(value, indent=2))


@contextlib.contextmanager
def failing_clearly(*, as_json: bool) -> Iterator[None]:
    """Turn an error of holdfast or of the system into a message and exit code 2, never a traceback."""
    try:
        yield
    except HoldfastError as error:
        if as_json:
            facts = {"rule": error.rule, "what": error.what, "limit": error.limit, "fix": error.fix}
            print_json({"error": facts})
        else:
            typer.echo(str(error), err=True)
        raise typer.Exit(ERROR) from error
    except OSError as error:
        if as_json:
            print_json({"error": {"what": str(error)}})
        else:
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(ERROR) from error
