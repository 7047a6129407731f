"""How ranks ended, as launchers tell it: the table of torchrun, and the lines with an exit code or a signal.

Does not: look at the texts of failures.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from holdfast.explain.evidence import Ending
from holdfast.explain.logs.lines import CleanLine

_FIELD = re.compile(r"\s*(time|rank|exitcode)\s*:\s*(.*)$")
_STATUS = re.compile(r"(-?\d{1,4})\b(?:\s*\(pid:\s*(\d{1,10})\))?")
_EXITS = (
    re.compile(r"\bexits with return code = (?P<status>-?\d{1,4})\b"),  # DeepSpeed
    re.compile(r"\bfailed \(exitcode: (?P<status>-?\d{1,4})\)(?: local_rank: \d+ \(pid: (?P<pid>\d{1,10})\))?"),
    re.compile(r"\bdied with <Signals\.(?P<name>SIG[A-Z]+): \d+>"),  # subprocess, as accelerate calls it
    re.compile(r"\bterminated with signal (?P<name>SIG[A-Z]+)\b"),  # torch.multiprocessing.spawn
    re.compile(r"\b(?:exited|terminated) with exit code (?P<status>-?\d{1,3})\b", re.IGNORECASE),
    re.compile(r"\bfinished with (?:error|exit) code (?P<status>-?\d{1,3})\b", re.IGNORECASE),
)
_SIGNALS = range(129, 193)  # as a shell tells them; a plain code says no more than the text does


def first_exit(lines: Sequence[CleanLine], *, from_number: int) -> list[Ending]:
    """Return by which signal the rank ended that a launcher told of first; nothing if none was told.

    A rank that the launcher itself has ended by SIGTERM, after another had failed, counts only where it is alone.

    Args:
        lines: Of the whole log.
        from_number: Of the line before which the run still went on.
    """
    found = []
    for line in lines:
        text = line.text
        # The exception of torch.multiprocessing has a signature of its own.
        if line.number < from_number or not ("code" in text or "with" in text) or "ProcessExitedException" in text:
            continue
        match = next((match for each in _EXITS if (match := each.search(text))), None)
        status = _status_of(match.groupdict()) if match is not None else 0
        if match is not None and (status < 0 or status in _SIGNALS):
            pid = match.groupdict().get("pid")
            found.append(
                Ending(status=status, pid=int(pid) if pid else None, role="trainer", unix_seconds=line.unix_seconds)
            )
    return [each for each in found if each.status != -signal.SIGTERM][:1] or found[:1]


def _status_of(told: Mapping[str, str | None]) -> int:
    name = told.get("name")
    if name is None:
        return int(told.get("status") or 0)
    return -signal.Signals[name] if name in signal.Signals.__members__ else 0


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
