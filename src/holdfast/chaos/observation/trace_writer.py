"""Write the trace of one process. `trace` defines the records and reads them."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any


class TraceWriter:
    """Writes the trace of this process, and keeps count of the process's steps.

    Each line is written immediately, so that it survives SIGKILL. The file is not kept open,
    because the script may close all descriptors.

    Args:
        folder: The trace folder of the attempt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.restart()

    def restart(self) -> None:
        """Start a new trace file. This method is called in a newly forked process."""
        # The trace file; None until the first line is written.
        self._path: Path | None = None
        self.steps_made = 0

    def write(self, kind: str, **facts: Any) -> None:
        """Add a line to the trace.

        Args:
            kind: ``"step"``, ``"save"`` or a kind of `trace.TraceEvent`.
            facts: The fields of the record, except those that are common to all lines.
        """
        if self._path is None:
            self._path = self._folder / f"{time.time_ns()}-{os.getpid()}.jsonl"
            self.write("start", versions=read_versions())
        line = {"kind": kind, "steps_made": self.steps_made, "seconds": time.time(), **facts}
        _append_unlimited(self._path, json.dumps(line, default=asdict).encode() + b"\n")


def read_versions() -> dict[str, str]:
    """Return the versions of Python and torch; empty for torch if it is not imported yet."""
    torch = sys.modules.get("torch")
    return {
        "Python": platform.python_version(),
        "torch": str(getattr(torch, "__version__", "")),
    }


def _append_unlimited(path: Path, line: bytes) -> None:
    """Append a line to a trace in one system call, even while a fault limits the size of files."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
    try:
        os.write(file, line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
        os.close(file)
