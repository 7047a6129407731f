"""Results that add up.

Each run is a piece of one result file, written as it grows, and the figures are of all.
"""

from __future__ import annotations

import fcntl
import json
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.results_file import Options, Result, describe_commit

Count = Callable[[Result, list[dict[str, Any]]], None]
"""Adds figures of all pieces to a result."""


def begin_piece(**of: Any) -> dict[str, Any]:
    """Return a new piece: when it began, on which commit, and what is given."""
    return {"begun": datetime.now(UTC).isoformat(), **describe_commit(), **of}


def read_pieces(out: Path) -> list[dict[str, Any]]:
    """Return the pieces of a result file; none if there is none yet."""
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    return list(json.loads(text)["samples"]["pieces"]) if text else []


def write_piece(out: Path, piece: dict[str, Any], count: Count) -> None:
    """Put a piece into a result file, in the place of what was written of it before, and count
    all again.
    """
    with out.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # pieces may run beside each other
        pieces = [*(each for each in read_pieces(out) if each["begun"] != piece["begun"]), piece]
        started = time.monotonic() - sum(each["seconds"] for each in pieces)
        options, samples = Options(name=out.stem, quick=False, out=out), {"pieces": pieces}
        result = Result(
            options=options, parameters={"pieces": len(pieces)}, samples=samples, started=started
        )
        count(result, pieces)
        result.write()


def asked_to_end() -> Callable[[], bool]:
    """Return whether SIGTERM or Ctrl-C came since.

    What was being done is then finished, and written.
    """
    came: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: came.append(number))
    return lambda: bool(came)
