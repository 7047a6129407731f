"""What the kernel knows and does for a supervisor: orphans come to us, who was killed for memory, what its log says.

Everything is optional: a kernel, a container or a user without the right gives None or nothing, never an error.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.core.control_groups import UNLIMITED_V1, fields_of, group_folders

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_READ_ALL, _SIZE_OF_BUFFER = 3, 10  # syslog(2)
_MOST_LOG_BYTES = 1 << 24  # of a kernel's log: CONFIG_LOG_BUF_SHIFT is at most 25, 18 by default
_MOST_LINES, _MOST_LINE_CHARACTERS = 20, 400
_OF_DEATH = re.compile(
    r"Killed process \d+|oom-kill:|segfault at|general protection|traps: |NVRM: Xid|Machine check|Hardware Error"
    r"|I/O error|blocked for more than"
)
_ROOT = Path("/")


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Let every orphaned descendant become a child of this process, so that none is lost."""
    with suppress(OSError, AttributeError):
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def count_oom_kills(root: Path = _ROOT) -> int | None:
    """Return how many processes of our own control group the kernel has killed for memory; None if it does not say.

    Only the innermost group that counts is read: those above it count the kills of other jobs too.
    """
    names = ("memory.events", "memory.oom_control")  # versions 2 and 1
    counts = (fields_of(each / name).get("oom_kill") for each in group_folders(root, "memory") for name in names)
    return next((count for count in counts if count is not None), None)


def memory_limits(root: Path = _ROOT) -> dict[str, int]:
    """Return the limits of memory, in bytes, by the path of the file that says them; unlimited ones are left out."""
    found = {}
    for folder in group_folders(root, "memory"):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # the other version, or "max"
                value = int((folder / name).read_text())
                if value < UNLIMITED_V1:
                    found[str(folder / name)] = value
    return found


class KernelLog:
    """The lines that the kernel logs from now on and that are about a death or bad hardware."""

    def __init__(self) -> None:
        self._before = _log_lines()

    def news(self) -> list[str]:
        """Return those lines since the start; nothing where the log may not be read."""
        lines = _log_lines()
        with suppress(ValueError, IndexError):  # so much was logged that the last line is gone: all of it is new
            lines = lines[len(lines) - lines[::-1].index(self._before[-1]) :]
        return lines_of_death(lines)


def _log_lines() -> list[str]:
    with suppress(OSError, AttributeError, MemoryError):
        call = _libc().klogctl
        size = min(call(_SIZE_OF_BUFFER, None, 0), _MOST_LOG_BYTES)
        if size > 0:
            buffer = ctypes.create_string_buffer(size)
            length = call(_READ_ALL, buffer, size)
            return buffer.raw[: max(length, 0)].decode(errors="replace").splitlines()
    return []


def lines_of_death(lines: Iterable[str]) -> list[str]:
    """Return the newest of the lines that are about a death or bad hardware, without their priority."""
    found = [re.sub(r"^<\d+>", "", line)[:_MOST_LINE_CHARACTERS] for line in lines if _OF_DEATH.search(line)]
    return found[-_MOST_LINES:]
