"""How commands print, fail and exit: one way for all of them.

0  done, and every check held
1  done, and a check failed: a damaged checkpoint, a broken promise
2  wrong use, or an error that kept the command from its work
141  whoever read the output has closed it (`| head`): as a shell says it of any program that SIGPIPE ended
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from rich.console import Console

CHECK_FAILED = 1
ERROR = 2
READER_GONE = 128 + signal.SIGPIPE
_WIDTH = 150  # of tables in a file or a pipe, which have no width


class _Stream(io.FileIO):
    """A standard stream whose reader may leave."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # what is still in a buffer goes there, without a word at the end
            os.close(nowhere)
            raise SystemExit(READER_GONE) from None  # no `Exception`, which many places catch


def leave_when_nobody_reads() -> None:
    """Let this process end quietly once a reader of its output has closed the pipe.

    The signal itself stays off: it would also end a command when a connection or a child of its own goes.
    """
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is None:
            continue
        old.flush()
        raw = _Stream(old.fileno(), "w", closefd=False)
        buffered = raw if old.write_through else io.BufferedWriter(raw)
        new = io.TextIOWrapper(
            cast("Any", buffered), old.encoding, old.errors, line_buffering=old.line_buffering,
            write_through=old.write_through,
        )  # fmt: skip
        setattr(sys, name, new)


def console() -> Console:
    """Return where a command prints for people."""
    from rich.console import Console  # not for `holdfast run`

    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def print_json(value: Any) -> None:
    """Print one JSON value."""
    print(json.dumps(value, indent=2))


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
            print(error, file=sys.stderr)
        raise SystemExit(ERROR) from error
    except OSError as error:
        if as_json:
            print_json({"error": {"what": str(error)}})
        else:
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(ERROR) from error
