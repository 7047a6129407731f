"""Find the progress that a running process records, without knowing its run directory.

A process that ``holdfast run`` observes has its progress board mapped into memory, and a process
with a Guard the ring of its steps, so both files are listed in ``/proc/<pid>/maps``.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import RunDirectoryError
from holdfast.recorder.black_box import STEPS_FILE
from holdfast.recorder.progress import read_board
from holdfast.recorder.reader import read_steps
from holdfast.recorder.run_files import BOARD_FILE
from holdfast.supervise.watch.limits import phase_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProgress:
    """The newest progress that a process has recorded.

    Args:
        mark: A value that changes whenever the process makes progress.
        step: The number of completed steps.
        phase: The current phase; empty if it is not recorded.
        since_seconds: When the progress was made, on the monotonic clock; None if unknown.
    """

    mark: Hashable
    step: int
    phase: str = ""
    since_seconds: float | None = None


def read_recorded_progress(pid: int) -> RecordedProgress | None:
    """Return the newest progress that a process has recorded, or None if it records none."""
    files = _mapped_files(pid)
    return _read_from_board(files.get(BOARD_FILE)) or _read_from_steps(files.get(STEPS_FILE))


def _mapped_files(pid: int) -> dict[str, Path]:
    """Return the files with recorded progress that a process has mapped, by their names."""
    text = ""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    files = {}
    for line in text.splitlines():
        # Fields of a line: addresses, permissions, offset, device, inode and file.
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/"):
            path = Path(words[5])
            if path.name in (BOARD_FILE, STEPS_FILE):
                files[path.name] = path
    return files


def _read_from_board(path: Path | None) -> RecordedProgress | None:
    standing = None
    # A board of a newer version of holdfast cannot be read.
    with suppress(RunDirectoryError):
        standing = None if path is None else read_board(path)
    if standing is None:
        return None
    return RecordedProgress(
        mark=standing.progress,
        step=standing.step,
        phase=phase_name(standing.phase),
        since_seconds=standing.since_seconds,
    )


def _read_from_steps(path: Path | None) -> RecordedProgress | None:
    steps = []
    with suppress(OSError, RunDirectoryError):
        steps = [] if path is None else read_steps(path.parent)
    if not steps:
        return None
    newest = steps[-1]
    return RecordedProgress(mark=(newest.global_step, newest.unix_seconds), step=newest.global_step)
