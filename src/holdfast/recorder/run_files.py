"""The files of a supervised run, and what each observed process says of itself.

``supervised.json`` and ``output.log`` are written by the supervisor, ``processes/<pid>-<ticks>/`` by each process. A
process is named by its pid and its start time in clock ticks, since pids come again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.core.durable import replace_file

SUPERVISED_FILE = "supervised.json"
OUTPUT_FILE = "output.log"
VERDICT_FILE = "verdict.json"
SUPERVISOR_FOLDER = "supervisor"
PROCESSES_FOLDER = "processes"
STACKS_FOLDER = "stacks"
PROCESS_FILE = "process.json"
BOARD_FILE = "progress.board"
SAMPLES_FILE = "samples.ring"
FAULTHANDLER_FILE = "stacks.txt"
ATTEMPT_LINE = "--- holdfast: attempt {number} ---"
OBSERVE_VARIABLE = "HOLDFAST_OBSERVE"
ATTEMPT_VARIABLE = "HOLDFAST_ATTEMPT"

ProcessRole = Literal["trainer", "loader worker", "launcher", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """What an observed process says of itself.

    Args:
        pid: Its number.
        ticks: When it started, in clock ticks since boot (field 22 of ``/proc/<pid>/stat``).
        ppid: Its parent's number when it started.
        argv: Its command line.
        attempt: Of the supervisor, from 0.
        role: As far as it shows: a trainer steps or calls backward, a loader worker serves one.
        rank: As the launcher says, or None.
        local_rank: Likewise.
        world_size: Likewise.
        torch: Version of torch, None before it is imported.
        started: Unix time.
    """

    pid: int
    ticks: int
    ppid: int
    argv: list[str]
    attempt: int = 0
    role: ProcessRole = "other"
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    torch: str | None = None
    started: float = 0.0

    @property
    def folder(self) -> str:
        """Return the name of its folder in ``processes/``."""
        return f"{self.pid}-{self.ticks}"


def write_process(run: Path, info: ProcessInfo) -> Path:
    """Write what a process says of itself, and return its folder."""
    folder = run / PROCESSES_FOLDER / info.folder
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / PROCESS_FILE, json.dumps(asdict(info)).encode())
    return folder


def read_processes(run: Path) -> list[tuple[Path, ProcessInfo]]:
    """Return the folders of observed processes with what they say, oldest first; a damaged one is passed over."""
    found = []
    for path in sorted((run / PROCESSES_FOLDER).glob(f"*/{PROCESS_FILE}")):
        info = _read(path)
        if info is not None:
            found.append((path.parent, info))
    return sorted(found, key=lambda pair: pair[1].started)


def _read(path: Path) -> ProcessInfo | None:
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        return ProcessInfo(**{name: values[name] for name in ProcessInfo.__slots__ if name in values})
    except (OSError, ValueError, TypeError, KeyError):
        return None
