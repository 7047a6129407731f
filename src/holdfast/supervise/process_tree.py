"""Find every process of a supervised command, and kill all of them.

The supervisor is a subreaper, so while it lives, all processes of its command are its descendants
(`Tree`). If the supervisor itself is killed, that link is lost. Then a *sentinel*, a separate
process that only waits for a pipe to close, finds the processes by the mark in their environment,
by their session, and by descent from such a process (`marked_processes`).

This module is also the sentinel's program (``python -I -S process_tree.py``). So it imports only
quick modules of the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

# Like ``typing.TYPE_CHECKING``, whose import takes too long here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Not HOLDFAST_*: variables with that prefix are the fields of a policy.
MARK_VARIABLE = "SUPERVISED_BY_HOLDFAST"
# Pause between two listings of the processes while they are being killed.
_LIST_SECONDS = 0.01
# A process in an uninterruptible wait cannot be killed, so the sentinel gives up after this time.
_SENTINEL_SECONDS = 20.0


class ProcessStat:
    """One row of the process table."""

    __slots__ = ("cpu_ticks", "pid", "ppid", "session", "state", "ticks")

    def __init__(
        self, pid: int, ppid: int, session: int, state: str, ticks: int, cpu_ticks: int
    ) -> None:
        self.pid = pid
        self.ppid = ppid
        # PID of the session leader.
        self.session = session
        # For example "R", "S", "T" (stopped), "Z" (ended, but not yet waited for).
        self.state = state
        # When it started, in clock ticks since boot.
        self.ticks = ticks
        # CPU time of all its threads, in clock ticks.
        self.cpu_ticks = cpu_ticks


def read_process(pid: int) -> ProcessStat | None:
    """Return one process, or None if it does not exist."""
    return read_stat(f"/proc/{pid}/stat")


def read_stat(path: str) -> ProcessStat | None:
    """Return the process, or the thread, that a ``stat`` file describes; None if it is gone."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - faster, of all processes
            # The name of the program, in parentheses, may contain anything.
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
    """Return when this process started, in clock ticks since boot; 0 if ``/proc`` is missing."""
    process = read_process(os.getpid())
    return 0 if process is None else process.ticks


def read_table() -> dict[int, ProcessStat]:
    """Return all processes by PID; takes about 20 microseconds per process."""
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - faster
        if name.isdigit():
            process = read_process(int(name))
            if process is not None:
                table[process.pid] = process
    return table


def children_by_parent(table: dict[int, ProcessStat]) -> dict[int, list[int]]:
    """Return the PIDs of the children of each process that has any, by its PID."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process.pid)
    return children


def descendants(table: dict[int, ProcessStat], of: Iterable[int]) -> set[int]:
    """Return the PIDs of all descendants of these processes.

    Args:
        table: All processes.
        of: PIDs; they themselves are not returned, unless one descends from another.
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
    """The processes of the command: the supervisor's descendants, with exceptions.

    Three kinds of children do not belong to the command:

    - Processes that the supervisor runs for itself, such as py-spy or the sentinel, stay in the
      supervisor's session; the command's processes never do.
    - Processes that existed before: a script may start a daemon and then exec the supervisor.
    - If the supervisor is process 1 of a container, it also inherits unrelated orphans; there, a
      child counts only if it carries the mark.

    Args:
        mark: Identifies the supervisor in the environment of the command's processes.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._supervisor = os.getpid()
        # PID and start time of the children that existed before.
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
        """Return the PIDs of children that have ended and that nobody else waits for.

        Args:
            waited_for: PIDs of children that somebody else waits for.
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
    """Return the live processes that carry the mark or are in a session, and their descendants."""
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
    """Return whether the environment of a process has the mark.

    There may be several marks, since a supervised command may itself be a supervisor.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - faster
            variables = file.read().split(b"\0")
    except OSError:
        return False
    prefix = MARK_VARIABLE.encode() + b"="
    return any(
        mark.encode() in variable[len(prefix) :].split(b",")
        for variable in variables
        if variable.startswith(prefix)
    )


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal and does not block it.

    Without a handler, most signals would end the process.
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
    """Send a signal to each process; skip those that have ended or that we may not signal."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def kill_all(find: Callable[[], set[int]], seconds: float) -> tuple[set[int], set[int]]:
    """Kill the processes that `find` returns until there are none: new ones may start meanwhile.

    Args:
        find: Returns the PIDs of the processes that are left.
        seconds: When to give up.

    Returns:
        The PIDs that were killed, and those that cannot be killed because they are stuck in the
        kernel.
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
    """Wait until the supervisor's end of the pipe closes, and kill what it left behind.

    Each line from the pipe is the ID of the newest session. The line ``done`` means that the
    supervisor ends regularly.

    Args:
        pipe: Descriptor to read from.
        mark: Identifies the supervisor in the environment of the command's processes.
        note: File for a note about what was killed; not written if the supervisor ended regularly.
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
    """Run the sentinel with its arguments: descriptor of the pipe, mark, and file to write to."""
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
