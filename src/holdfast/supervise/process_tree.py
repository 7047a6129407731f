"""Find every process of a supervised command, and kill all of them.

The supervisor is a subreaper, so all processes of its command remain its descendants while it lives
(`Tree`). If the supervisor itself is killed, that link is lost, and a *sentinel* takes over. The
sentinel is a separate process that only waits for a pipe to close. It then finds the command's
processes by a mark in their environment, by their session, or as descendants of such a process
(`marked_processes`).

The sentinel runs this module as a script (``python -I -S process_tree.py``), so only standard
library modules that import quickly are used here.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

# Replaces ``typing.TYPE_CHECKING``, because importing ``typing`` would take too long.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Not named HOLDFAST_*, because variables with that prefix set fields of the policy.
MARK_VARIABLE = "SUPERVISED_BY_HOLDFAST"
# Interval at which the remaining processes are listed while they are being killed.
_LIST_SECONDS = 0.01
# The sentinel gives up after this time: a process in an uninterruptible wait cannot be killed.
_SENTINEL_SECONDS = 20.0
# A process that is starting a program has no environment for some microseconds, or milliseconds if
# the program is read from the disk.
_PROGRAM_START_SECONDS = 1.0
_PROGRAM_START_TICK_SECONDS = 0.001


class ProcessStat:
    """A process (or thread), as ``/proc/<pid>/stat`` describes it."""

    __slots__ = ("cpu_ticks", "pid", "ppid", "session", "state", "ticks")

    def __init__(
        self, pid: int, ppid: int, session: int, state: str, ticks: int, cpu_ticks: int
    ) -> None:
        self.pid = pid
        self.ppid = ppid
        # PID of the session leader.
        self.session = session
        # For example "R" (running), "S" (sleeping), "T" (stopped) or "Z" (a zombie).
        self.state = state
        # Start time, in clock ticks since boot.
        self.ticks = ticks
        # CPU time used by all threads, in clock ticks.
        self.cpu_ticks = cpu_ticks


def read_process(pid: int) -> ProcessStat | None:
    """Return the process with this PID, or None if there is no such process."""
    return read_stat(f"/proc/{pid}/stat")


def read_stat(path: str) -> ProcessStat | None:
    """Return the process or thread described by a ``stat`` file, or None if it no longer exists."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - faster for all processes
            # The program name is in parentheses and may itself contain spaces and parentheses.
            first_word, _, rest = file.read().partition(b" ")
            words = rest.rpartition(b")")[2].split()
        return ProcessStat(
            pid=int(first_word),
            ppid=int(words[1]),
            session=int(words[3]),
            state=words[0].decode(),
            ticks=int(words[19]),
            cpu_ticks=int(words[11]) + int(words[12]),
        )
    except (OSError, ValueError, IndexError):
        return None


def read_start_ticks() -> int:
    """Return this process's start time in clock ticks since boot, or 0 without ``/proc``."""
    process = read_process(os.getpid())
    return 0 if process is None else process.ticks


def read_table() -> dict[int, ProcessStat]:
    """Return all processes, keyed by PID. Takes about 20 microseconds per process."""
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - faster
        if name.isdigit():
            process = read_process(int(name))
            if process is not None:
                table[process.pid] = process
    return table


def children_by_parent(table: dict[int, ProcessStat]) -> dict[int, list[int]]:
    """Map the PID of each parent process to the PIDs of its children."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process.pid)
    return children


def descendants(table: dict[int, ProcessStat], of: Iterable[int]) -> set[int]:
    """Return the PIDs of all descendants of the given processes.

    Args:
        table: All processes by PID, from `read_table`.
        of: PIDs of the ancestors. The result excludes them, unless one descends from another.
    """
    children = children_by_parent(table)
    pids: set[int] = set()
    parents = list(of)
    while parents:
        for child in children.get(parents.pop(), ()):
            if child not in pids:
                pids.add(child)
                parents.append(child)
    return pids


class Tree:
    """Finds the processes of the command among the supervisor's descendants.

    Three kinds of children are not part of the command:

    - Helpers of the supervisor, such as py-spy or the sentinel. They stay in the supervisor's
      session, whereas the command has a session of its own.
    - Children that are older than the supervisor: a shell script may start a daemon and then exec
      ``holdfast run``.
    - Unrelated orphans, if the supervisor is process 1 of a container. A child then counts only if
      it carries the mark.

    Args:
        mark: Identifies the supervisor in the environment of the command's processes.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._supervisor = os.getpid()
        # PID and start time of each child that existed before this object was created.
        self._earlier_children: set[tuple[int, int]] = set()
        table = read_table()
        self._own_session = 0
        if self._supervisor in table:
            self._own_session = table[self._supervisor].session
        self._earlier_children = {(child.pid, child.ticks) for child in self._children(table)}

    def processes(self) -> set[int]:
        """Return the PIDs of all live processes of the command."""
        table = read_table()
        children = [child.pid for child in self._children(table)]
        if self._supervisor == 1:
            children = [pid for pid in children if _carries_mark(pid, self._mark)]
        pids = {*children, *descendants(table, children)}
        return {pid for pid in pids if table[pid].state != "Z"}

    def ended_orphans(self, waited_for: set[int]) -> list[int]:
        """Return the PIDs of the command's zombie processes that nothing else will reap.

        Args:
            waited_for: PIDs of children that other code will reap.
        """
        return [
            child.pid
            for child in self._children(read_table())
            if child.state == "Z" and child.pid not in waited_for
        ]

    def _children(self, table: dict[int, ProcessStat]) -> list[ProcessStat]:
        return [
            process
            for process in table.values()
            if process.ppid == self._supervisor
            and process.session != self._own_session
            and (process.pid, process.ticks) not in self._earlier_children
        ]


def marked_processes(mark: str, sessions: Iterable[int]) -> set[int]:
    """Return the PIDs of the command's live processes, without relying on the supervisor.

    These are the processes that carry the mark or are in one of the sessions, and all their
    descendants.
    """
    table = read_table()
    sessions = set(sessions)
    roots = [
        process.pid
        for process in table.values()
        if process.session in sessions or _carries_mark(process.pid, mark)
    ]
    pids = {*roots, *descendants(table, roots)}
    return {pid for pid in pids if table[pid].state != "Z" and pid != os.getpid()}


def _carries_mark(pid: int, mark: str) -> bool:
    """Return whether the environment of a process contains the mark.

    The variable may hold several marks, because a supervised command may itself be a supervisor.
    """
    prefix = MARK_VARIABLE.encode() + b"="
    return any(
        mark.encode() in variable[len(prefix) :].split(b",")
        for variable in _read_environment(pid).split(b"\0")
        if variable.startswith(prefix)
    )


def _read_environment(pid: int) -> bytes:
    """Return the environment of a process, or no bytes if the process has none or has ended.

    While a process is starting a program (``execve``), its environment cannot be read, which would
    hide its mark. This function waits until it can.
    """
    deadline = time.monotonic() + _PROGRAM_START_SECONDS
    while True:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - faster
                environment = file.read()
        except OSError:
            return b""
        if environment or _has_no_environment(pid) or time.monotonic() > deadline:
            return environment
        time.sleep(_PROGRAM_START_TICK_SECONDS)


def _has_no_environment(pid: int) -> bool:
    """Return whether a process really has no environment, and is not just starting a program.

    This is so if the process has no memory (zombies, threads of the kernel), or if its environment
    starts and ends at the same address. In the middle of ``execve`` these addresses are still 0.
    See "vsize", "env_start" and "env_end" in :manpage:`proc_pid_stat(5)`.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - faster
            words = file.read().rpartition(b")")[2].split()
        # Field n of the manual page is word n - 3, because the PID and the name come before the
        # last parenthesis.
        memory_bytes = int(words[20])
        environment_start = int(words[47])
        environment_end = int(words[48])
    except (OSError, ValueError, IndexError):
        return True
    if memory_bytes == 0:
        return True
    is_starting_program = environment_start == 0 and environment_end == 0
    return environment_start == environment_end and not is_starting_program


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal and does not block it.

    Sending most signals to a process without a handler would kill it.
    """
    masks = {}
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123 - faster
            for line in file:
                name, _, value = line.partition(b":")
                if name in (b"SigCgt", b"SigBlk"):
                    masks[name] = int(value, 16)
    except (OSError, ValueError):
        return False
    if len(masks) < 2:
        return False
    bit = 1 << (number - 1)
    is_caught = bool(masks[b"SigCgt"] & bit)
    is_blocked = bool(masks[b"SigBlk"] & bit)
    return is_caught and not is_blocked


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process, ignoring processes that have ended or may not be signaled."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def kill_all(find: Callable[[], set[int]], seconds: float) -> tuple[set[int], set[int]]:
    """Kill the processes that `find` returns, again and again, until it returns none.

    One pass is not enough, because new processes may start in the meantime.

    Args:
        find: Returns the PIDs of the remaining processes.
        seconds: Time limit.

    Returns:
        The PIDs of the killed processes, and the PIDs of processes that could not be killed because
        they are stuck in the kernel.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + seconds
    while True:
        left = find()
        if not left:
            return killed, set()
        signal_all(left, signal.SIGKILL)
        killed |= left
        if time.monotonic() > deadline:
            return killed - left, left
        time.sleep(_LIST_SECONDS)


# --- the sentinel ---


def guard_command(pipe: int, mark: str, note: str) -> None:
    """Wait until the supervisor closes its end of the pipe, then kill the remaining processes.

    The supervisor writes the session ID of each command that it starts to the pipe, and ``done``
    before it exits normally.

    Args:
        pipe: File descriptor of the pipe's reading end.
        mark: Identifies the supervisor in the environment of the command's processes.
        note: File that lists the killed processes, as JSON. It is not written if the supervisor
            exited normally.
    """
    session = 0
    ended_regularly = False
    with open(pipe, "rb", closefd=False) as file:
        for line in file:
            ended_regularly = line == b"done\n"
            if line.strip().isdigit():
                session = int(line)
    ended_at = time.time()
    sessions = [session] if session else []
    killed, left = kill_all(lambda: marked_processes(mark, sessions), _SENTINEL_SECONDS)
    if not ended_regularly:
        import json

        content = {"unix_seconds": ended_at, "killed": sorted(killed), "left": sorted(left)}
        with suppress(OSError), open(note, "w") as file:  # noqa: PTH123 - pathlib imports slowly
            json.dump(content, file)


def main(arguments: list[str]) -> None:
    """Run the sentinel, ignoring signals; `arguments` are those of `guard_command`."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_IGN)
    guard_command(int(arguments[0]), arguments[1], arguments[2])


if __name__ == "__main__":
    main(sys.argv[1:])
