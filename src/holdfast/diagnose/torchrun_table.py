"""The table that torchrun prints when a rank has failed: which was the first, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from holdfast.diagnose.evidence import Ending

_FIELD = re.compile(r"\s*(time|rank|exitcode)\s*:\s*(.*)$")
_STATUS = re.compile(r"(-?\d{1,4})\b(?:\s*\(pid:\s*(\d{1,10})\))?")


def read_table(lines: Sequence[str]) -> list[Ending]:
    """Return how the rank ended that torchrun saw fail first; nothing if the table is cut off.

    Args:
        lines: Those after "Root Cause (first observed failure):".
    """
    fields = {found[1]: found[2] for found in map(_FIELD.match, lines) if found is not None}
    status = _STATUS.match(fields.get("exitcode", ""))
    if status is None:
        return []
    rank = re.match(r"\d{1,7}", fields.get("rank", ""))
    return [
        Ending(
            status=int(status[1]),
            pid=int(status[2]) if status[2] else None,
            rank=int(rank[0]) if rank else None,
            role="trainer",
            unix_seconds=_seconds(fields.get("time", "")),
        )
    ]


def _seconds(written: str) -> float | None:
    try:
        return datetime.strptime(written.strip(), "%Y-%m-%d_%H:%M:%S").replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None
