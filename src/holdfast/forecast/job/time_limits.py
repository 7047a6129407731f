"""Limit the CPU time and the idle time of the process that traces a model.

Wall-clock time is not limited, because every process is slow on a busy machine. The times are read
from ``/proc``, so this module works only on Linux.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# About twenty times the 29 s of CPU time that the slowest tested model needed: a recurrent decoder
# with 100 time steps.
MOST_CPU_SECONDS = 600.0
# Chosen equal to the limit on CPU time. Downloading a file or reading from a slow disk uses some
# CPU time and does not count as idle, but a deadlock uses none.
MOST_IDLE_SECONDS = 600.0

# A process is idle if it uses less than this fraction of a CPU: 1 s in ten minutes. A thread that
# only polls a flag uses far less and therefore counts as idle.
_ACTIVE_SHARE = 1 / 600
# The shortest time between two measurements.
_INTERVAL_SECONDS = 1.0
# A longer time between two measurements is counted as only this much idle time, because it means
# that the measuring process itself was suspended.
_LONGEST_INTERVAL_SECONDS = 5.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class TimeLimits:
    """The time limits of a child process. Call `exceeded` repeatedly while it runs.

    Args:
        pid: The process ID of a child that has not been reaped yet.
        cpu_seconds: The CPU time that the child may use. The limit applies only once this much
            wall-clock time has passed as well, so that parallel threads do not reach it earlier.
        idle_seconds: The wall-clock time for which the child and all its descendants may be idle.
    """

    def __init__(self, pid: int, *, cpu_seconds: float, idle_seconds: float) -> None:
        self._pid = pid
        self._cpu_seconds = cpu_seconds
        self._idle_seconds = idle_seconds
        now = time.monotonic()
        self._started = now
        self._last_measurement = now
        self._idle = 0.0
        self._activity = 0.0

    def exceeded(self) -> str | None:
        """Check the limits, at most about once per second.

        Returns:
            A description of the exceeded limit, such as "took more than 1 s of CPU time", or None.
        """
        now = time.monotonic()
        interval = now - self._last_measurement
        if interval < min(_INTERVAL_SECONDS, self._idle_seconds):
            return None
        # A long interval does not mean that the child was idle: this process may have been
        # suspended with Ctrl-Z, or the machine may have slept.
        self._idle += min(interval, _LONGEST_INTERVAL_SECONDS)
        self._last_measurement = now

        cpu_seconds = _own_cpu_seconds(self._pid)
        if min(cpu_seconds, now - self._started) > self._cpu_seconds:
            return f"took more than {self._cpu_seconds:g} s of CPU time"

        activity = (
            _descendants_cpu_seconds(self._pid) + cpu_seconds + _seconds_ready_to_run(self._pid)
        )
        # Use the absolute value: the sum may also decrease, because it does not include threads and
        # processes that have exited.
        if abs(activity - self._activity) >= _ACTIVE_SHARE * self._idle_seconds:
            self._activity = activity
            self._idle = 0.0
        if self._idle > self._idle_seconds:
            return f"did nothing for {self._idle_seconds:g} s"
        return None


def _own_cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in seconds; 0 if the process has exited."""
    fields = _stat(pid)
    return 0.0 if fields is None else _cpu_seconds(fields)


def _descendants_cpu_seconds(pid: int) -> float:
    """Return the total CPU time of all descendants of a process, in seconds."""
    processes = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - only the names are needed
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            processes[int(name)] = fields

    children: dict[int, list[int]] = {}
    for process, fields in processes.items():
        children.setdefault(int(fields[1]), []).append(process)

    seconds = 0.0
    pending = list(children.get(pid, ()))
    while pending:
        descendant = pending.pop()
        seconds += _cpu_seconds(processes[descendant])
        pending += children.get(descendant, ())
    return seconds


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat``, starting with the third one (the process state).

    Returns:
        The fields, or None if the process has exited.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _cpu_seconds(fields: list[str]) -> float:
    """Return user time plus system time, in seconds.

    These are fields 14 and 15 in proc(5), counted from 1. `_stat` returns them at positions 11 and
    12, because it leaves out the first two fields and its list is counted from 0.
    """
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def _seconds_ready_to_run(pid: int) -> float:
    """Return how long the threads of a process have waited for a CPU in total.

    Returns:
        The time in seconds, or 0 if the kernel does not record it.
    """
    nanoseconds = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((thread / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return nanoseconds / 1e9
