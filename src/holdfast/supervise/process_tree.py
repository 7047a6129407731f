"""Find every process of a supervised command, and end all of them.

From the supervisor, and after its own death.

The supervisor is a subreaper, so while it lives all processes of its command are its descendants.
When it is killed
itself, that tie is gone: then a *sentinel*, a process of its own that waits for nothing but the end
    of a pipe, finds
them by the mark in their environment, by their session and by descent from such a one. This module
is its program (``python -I -S process_tree.py``), so it uses the standard library only, and of that
what is imported quickly.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # as in ``typing``
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARK_VARIABLE = "SUPERVISED_BY_HOLDFAST"  # not HOLDFAST_*: those are the fields of a policy
_LOOK_SECONDS = 0.01
_SENTINEL_SECONDS = 20.0  # a process in an uninterruptible wait cannot be killed: then it gives up


class Process:
    """One line of the table of processes."""

    __slots__ = ("pid", "ppid", "session", "state", "ticks")

    def __init__(self, pid: int, ppid: int, session: int, state: str, ticks: int) -> None:
        self.pid, self.ppid = pid, ppid
        self.session = session  # pid of the session's leader
        self.state = state  # such as "R", "S", "T" (stopped), "Z" (ended, not yet waited for)
        self.ticks = ticks  # when it started, in clock ticks since boot


def read_process(pid: int) -> Process | None:
    """Return one process, or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - of all processes, at each look
            words = file.read().rpartition(b")")[2].split()
        return Process(pid, int(words[1]), int(words[3]), words[0].decode(), int(words[19]))
    except (OSError, ValueError, IndexError):
        return None


def read_table() -> dict[int, Process]:
    """Return all processes by pid; about 20 microseconds for each."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return {each.pid: each for each in found if each is not None}


def descendants(table: dict[int, Process], of: Iterable[int]) -> set[int]:
    """Return the pids of these processes' children, their children, and so on.

    Themselves not included.
    """
    children: dict[int, list[int]] = {}
    for each in table.values():
        children.setdefault(each.ppid, []).append(each.pid)
    found: set[int] = set()
    waiting = list(of)
    while waiting:
        new = [child for child in children.get(waiting.pop(), ()) if child not in found]
        found.update(new)
        waiting += new
    return found


class Tree:
    """The processes of the command, as its supervisor sees them.

    Its descendants, since it is a subreaper.

    What the supervisor runs for itself, such as py-spy or the sentinel, stays in its own session;
    the command never
    does. What was there before is spared: a script may start a daemon and then execute us in its
        place. Process 1 of
    a container inherits the orphans of strangers too, so there a child counts only if it carries
    the mark.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._supervisor = os.getpid()
        self._spared: set[tuple[int, int]] = set()
        table = read_table()
        self._session = table[self._supervisor].session if self._supervisor in table else 0
        self._spared = {(each.pid, each.ticks) for each in self._children(table)}

    def processes(self) -> set[int]:
        """Return the pids of all live processes of the command."""
        table = read_table()
        tops = [each.pid for each in self._children(table)]
        if self._supervisor == 1:
            tops = [pid for pid in tops if _carries(pid, self._mark)]
        return {pid for pid in {*tops, *descendants(table, tops)} if table[pid].state != "Z"}

    def ended_orphans(self, known: set[int]) -> list[int]:
        """Return the pids of ended children that nobody else waits for.

        These are waited for elsewhere.
        """
        children = self._children(read_table())
        return [each.pid for each in children if each.state == "Z" and each.pid not in known]

    def _children(self, table: dict[int, Process]) -> list[Process]:
        return [
            each
            for each in table.values()
            if each.ppid == self._supervisor
            and each.session != self._session
            and (each.pid, each.ticks) not in self._spared
        ]


def marked_processes(mark: str, sessions: Iterable[int]) -> set[int]:
    """Return the live processes that carry the mark, those of the sessions, and the descendants
    of both.
    """
    table, wanted = read_table(), set(sessions)
    tops = [
        each.pid for each in table.values() if each.session in wanted or _carries(each.pid, mark)
    ]
    found = {*tops, *descendants(table, tops)}
    return {pid for pid in found if table[pid].state != "Z" and pid != os.getpid()}


def _carries(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            entries = file.read().split(b"\0")
    except OSError:
        return False
    name = MARK_VARIABLE.encode() + b"="
    return any(
        mark.encode() in entry[len(name) :].split(b",")
        for entry in entries
        if entry.startswith(name)
    )


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal and does not block it.

    Else most signals would end it.
    """
    masks = {}
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
            for line in file:
                name, _, value = line.partition(b":")
                if name in (b"SigCgt", b"SigBlk"):
                    masks[name] = int(value, 16)
    except (OSError, ValueError):
        return False
    bit = 1 << (number - 1)
    return bool(masks.get(b"SigCgt", 0) & bit and not masks.get(b"SigBlk", bit) & bit)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each; one that has ended, or that is not ours to signal, is passed over."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def kill_all(find: Callable[[], set[int]], seconds: float) -> tuple[set[int], set[int]]:
    """Kill what `find` returns until it returns nothing, for so many seconds.

    Processes may be born meanwhile.

    Return the pids that were killed, and those that cannot be, since the kernel waits for something
    in their name.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + seconds
    while left := find():
        signal_all(left, signal.SIGKILL)
        killed |= left
        if time.monotonic() > deadline:
            return killed - left, left
        time.sleep(_LOOK_SECONDS)
    return killed, set()


def keep_watch(pipe: int, mark: str, note: str) -> None:
    """Wait until the supervisor's end of the pipe is closed.

    Then kill what it has left (`marked_processes`).

    Each line that comes through the pipe is the number of the newest session; a line ``"done"``
    says that the supervisor has ended by itself. If it has not, what was found is written to the
    file `note`.
    """
    session, done = 0, False
    with open(pipe, "rb", closefd=False) as file:
        for line in file:
            done = line == b"done\n"
            session = int(line) if line.strip().isdigit() else session
    ended = time.time()
    killed, left = kill_all(
        lambda: marked_processes(mark, [session] if session else []), _SENTINEL_SECONDS
    )
    if not done:
        import json

        with suppress(OSError), open(note, "w") as file:  # noqa: PTH123 - as above
            json.dump({"unix_seconds": ended, "killed": sorted(killed), "left": sorted(left)}, file)


def main(arguments: list[str]) -> None:
    """Be the sentinel: descriptor of the pipe, mark, and file to write to."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_IGN)
    keep_watch(int(arguments[0]), arguments[1], arguments[2])


if __name__ == "__main__":
    main(sys.argv[1:])
