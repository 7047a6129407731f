"""Write the trace of one process. Its contents are defined in `trace`, which also reads it."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class TraceWriter:
    """Writes the trace of this process and counts its steps.

    Each line is written at once with one system call, so that it survives SIGKILL. The file is
    created with the first line.

    Args:
        folder: The trace folder of the attempt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder
        self._file: int | None = None
        self.steps_made = 0

    def restart(self) -> None:
        """Begin a separate trace in a process that was just forked."""
        self._file = None
        self.steps_made = 0

    def count_step(self) -> None:
        """Count one more step of an optimizer."""
        self.steps_made += 1

    def write(self, kind: str, **facts: Any) -> None:
        """Add a line to the trace.

        Args:
            kind: ``"step"``, ``"save"`` or a kind of `trace.TraceEvent`.
            facts: The fields of the record, without those that every line has.
        """
        if self._file is None:
            self._create()
            self._append("start", {"versions": read_versions()})
        elif not self._is_open(self._file):
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._append(kind, facts)

    def _create(self) -> None:
        self._path = self._folder / f"{time.time_ns()}-{os.getpid()}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)

    def _append(self, kind: str, facts: dict[str, Any]) -> None:
        assert self._file is not None
        line = {"kind": kind, "steps_made": self.steps_made, "seconds": time.time(), **facts}
        _append_unlimited(self._file, json.dumps(line).encode() + b"\n")

    def _is_open(self, file: int) -> bool:
        """Return whether a descriptor is still our trace.

        A script may close every descriptor, and open another file under the same number.
        """
        with suppress(OSError):
            return os.path.samestat(os.fstat(file), self._path.stat())
        return False


def read_versions() -> dict[str, str]:
    """Return the versions of Python and torch; torch's is empty until it is imported."""
    torch = sys.modules.get("torch")
    return {
        "Python": platform.python_version(),
        "torch": str(getattr(torch, "__version__", "")),
    }


def _append_unlimited(file: int, line: bytes) -> None:
    """Append a line to a trace, which no injected limit on file sizes may cut.

    Args:
        file: Descriptor of the trace.
        line: The line with its end.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
    try:
        os.write(file, line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
