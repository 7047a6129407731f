"""Observe which threads of a process work between two points in time, without knowing its code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.control_groups import read_fields
from holdfast.supervise.watch.process_evidence import read_io_bytes, read_proc_file

# CPU time per wait above which a thread counts as working rather than polling. In measurements,
# polling threads used up to 225,000 ns per wait, and small training steps 1,000,000 ns.
_WORK_NANOSECONDS_PER_WAIT = 400_000


class ObservedThreads:
    """The threads of some processes, and which of them were active between two observations.

    Args:
        pids: PIDs of the processes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        # IDs of the threads that read or wrote data.
        self.transferring: set[int] = set()
        # IDs of the threads that did more than wait.
        self.working: set[int] = set()

    def observe(self, seconds: float) -> None:
        """Observe the threads twice, this many seconds apart."""
        before = _read_activities(self._pids)
        time.sleep(seconds)
        after = _read_activities(self._pids)
        for tid in before.keys() & after.keys():
            if after[tid].io_bytes != before[tid].io_bytes:
                self.transferring.add(tid)
            if after[tid].has_worked_since(before[tid]):
                self.working.add(tid)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ThreadActivity:
    """A thread's activity since its start: bytes read and written, number of waits, CPU time."""

    io_bytes: int
    waits: int
    cpu_nanoseconds: int

    def has_worked_since(self, before: _ThreadActivity) -> bool:
        """Return whether the thread has done more than wait.

        A blocked thread starts no new waits, and a polling thread uses little CPU time per wait.
        """
        if self.io_bytes != before.io_bytes:
            return True
        waits = self.waits - before.waits
        cpu_nanoseconds = self.cpu_nanoseconds - before.cpu_nanoseconds
        return waits > 1 and cpu_nanoseconds > _WORK_NANOSECONDS_PER_WAIT * waits


def _read_activities(pids: Sequence[int]) -> dict[int, _ThreadActivity]:
    """Return the activity of each thread of these processes, by thread ID."""
    activities = {}
    for pid in pids:
        for folder in Path(f"/proc/{pid}/task").glob("*"):
            scheduler_words = read_proc_file(pid, f"task/{folder.name}/schedstat").split()
            activities[int(folder.name)] = _ThreadActivity(
                io_bytes=read_io_bytes(folder),
                waits=read_fields(folder / "status").get("voluntary_ctxt_switches", 0),
                cpu_nanoseconds=int(scheduler_words[0]) if scheduler_words else 0,
            )
    return activities
