"""One life of a supervised command: wait for it, serve its output, pass signals on, end it and whatever it leaves.

Does not: start it (``launching``), judge how it ended or start another (``supervisor``).
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from holdfast.recorder.run_files import ProcessInfo, process_lives, read_processes
from holdfast.supervise.launch.launching import Launcher, Sentinel
from holdfast.supervise.launch.output import Copier, Streams
from holdfast.supervise.launch.signals import ASKING_TO_END, Signals
from holdfast.supervise.process_tree import Tree, kill_all, signal_all

if TYPE_CHECKING:
    from holdfast.explain.hangs.blame import Hang

Tell = Callable[..., None]
_TICK_SECONDS = 1.0
_LEFTOVER_SECONDS = 0.4  # after the command itself has ended; no process is left 1 s after any death
_KILL_SECONDS = 5.0  # SIGKILL takes milliseconds, unless the kernel waits for a device or a network disk
_QUIET_SECONDS = 0.1  # a terminal passes its last bytes on through a work queue of the kernel
_FLUSH_SECONDS = 5.0  # for a slow reader of our own output
_MOST_ASKED = 3  # whoever asks a third time means it, and who presses Ctrl-C a second time
_KILLED = "killed with SIGKILL, since it had not ended when it was told to"
_TWICE_SECONDS = 0.5  # a shell and a wrapper around us may both pass one Ctrl-C on


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an attempt ended.

    Args:
        status: Exit code, negative for a signal.
        seconds: How long it ran.
        asked: The signal by which the user or a scheduler asked us to end, or None.
        sent: The last signal that we sent on our own account, after a hang or a time of grace, or None.
        hang: That it was ended for, or None.
    """

    status: int
    seconds: float
    asked: int | None
    sent: int | None
    hang: Hang | None


class Attempt:
    """Serve one command until nothing of it is left.

    Args:
        number: From 0.
        run: The run directory.
        child: The command; it leads a session of its own.
        tree: Its processes.
        streams: Its streams.
        copier: Moves what it prints.
        signals: Entered already.
        sentinel: Revived when somebody kills it.
        launcher: If the command starts ranks.
        grace_seconds: Between asking it to end and SIGKILL.
        tell: Records an event.
    """

    def __init__(
        self,
        *,
        number: int,
        run: Path,
        child: subprocess.Popen[bytes],
        tree: Tree,
        streams: Streams,
        copier: Copier,
        signals: Signals,
        sentinel: Sentinel,
        launcher: Launcher | None,
        grace_seconds: float,
        tell: Tell,
    ) -> None:
        self._number, self._run = number, run
        self._child, self._tree, self._streams, self._copier = child, tree, streams, copier
        self._signals, self._sentinel, self._launcher = signals, sentinel, launcher
        self._grace = grace_seconds
        self._tell = tell
        self._hangs: SimpleQueue[Hang] = SimpleQueue()
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._hang: Hang | None = None
        self._asked: list[int] = []
        self._interrupted: float | None = None
        self._sent: int | None = None
        self._deadline: float | None = None
        self._doomed: tuple[float, list[ProcessInfo]] | None = None
        self._started = self._last_look = time.monotonic()

    def take_hang(self, hang: Hang) -> None:
        """Do what is to be done about a hang; from any thread."""
        self._hangs.put(hang)
        self._signals.rouse()

    def take_line(self, text: str) -> None:
        """Print a line of ours; from any thread."""
        self._lines.put(text)
        self._signals.rouse()

    def serve(self) -> End:
        """Wait until the command has ended, end what it leaves, and return how it went."""
        self._signals.attach(self._child.pid)
        while not self._has_ended():
            while not self._wait_once(_TICK_SECONDS):
                continue  # only output, of which there may be much
            self._say_lines()
            self._look_at_hangs()
            self._keep_deadlines()
            if self._sentinel.revive():
                self._tell("sentinel_revived")
        self._signals.command = None
        seconds = time.monotonic() - self._started
        status = self._child.wait()
        self._end_leftovers()
        self._copier.drain(quiet_seconds=_QUIET_SECONDS, flush_seconds=max(self._grace, _FLUSH_SECONDS))
        self._say_lines()
        return End(
            status=status,
            seconds=seconds,
            asked=self._asked[0] if self._asked else None,
            sent=self._sent,
            hang=self._hang,
        )

    def _has_ended(self) -> bool:
        # Without taking its status: while it is not waited for, its number cannot become another process's.
        found = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None

    def _wait_once(self, seconds: float) -> bool:
        """Serve output; return whether there is more to do: somebody woke us, or it is so many seconds later."""
        now = time.monotonic()
        until = min(self._last_look + seconds, self._deadline or math.inf)
        poll = select.poll()
        for descriptor, events in [(self._signals.wake, select.POLLIN), *self._copier.wishes()]:
            poll.register(descriptor, events)
        ready = poll.poll(max(0.0, min(until - now, self._copier.rests(now))) * 1e3)
        self._copier.serve(ready)
        now = time.monotonic()
        if now < until and not any(descriptor == self._signals.wake for descriptor, _ in ready):
            return False
        self._last_look = now
        for number in self._signals.take():
            self._on_signal(number)
        return True

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGWINCH:
            self._streams.follow_size()
            if self._signals.command is not None:  # it has no controlling terminal that would tell it
                with suppress(OSError):
                    os.killpg(self._signals.command, number)
        else:
            self._tell("signal", **{"number": number, "from": "user"})
            if number in ASKING_TO_END:
                self._on_asked(number)

    def _on_asked(self, number: int) -> None:
        now = time.monotonic()
        again = number == signal.SIGINT and self._interrupted is not None
        again = again and now - (self._interrupted or now) >= _TWICE_SECONDS
        if number == signal.SIGINT and self._interrupted is None:
            self._interrupted = now
        self._asked.append(number)
        self._limit(0.0 if again or len(self._asked) >= _MOST_ASKED else self._grace)
        if len(self._asked) == 1:
            at_once = ", or at once after a second one" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            self._copier.say(f"{name} passed on; what still runs in {self._grace:g} s is killed{at_once}")

    def _limit(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _reap(self) -> None:
        for pid in self._tree.ended_orphans({self._child.pid}):
            with suppress(OSError):
                os.waitpid(pid, os.WNOHANG)

    def _say_lines(self) -> None:
        with suppress(Empty):
            while True:
                self._copier.say(self._lines.get_nowait())

    def _look_at_hangs(self) -> None:
        try:
            hang = self._hangs.get_nowait()
        except Empty:
            return
        if hang.remedy == "wait" or self._sent is not None:
            return
        self._copier.say(hang.sentence)
        if hang.remedy == "continue":
            signal_all({hang.blamed_pid, hang.pid}, signal.SIGCONT)
            return
        self._hang = hang
        if hang.remedy == "end":
            self._limit(0.0)
        elif self._launcher is not None and self._launcher.restarts:  # it starts its workers again when they end
            trainers = self._live_trainers()
            self._tell("ranks_ended", pids=[each.pid for each in trainers], signal=int(signal.SIGTERM))
            signal_all([each.pid for each in trainers], signal.SIGTERM)
            self._doomed = (time.monotonic() + self._grace, trainers)
        else:
            self._sent = signal.SIGTERM
            signal_all([self._child.pid], signal.SIGTERM)
            with suppress(OSError):
                os.killpg(self._child.pid, signal.SIGCONT)  # one that is stopped could not answer
            self._limit(self._grace)

    def _live_trainers(self) -> list[ProcessInfo]:
        found = (info for _, info in read_processes(self._run))
        return [each for each in found if each.role == "trainer" and each.attempt == self._number and _lives(each)]

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        if self._doomed is not None and now >= self._doomed[0]:
            signal_all([each.pid for each in self._doomed[1] if _lives(each)], signal.SIGKILL)
            self._doomed = None
        if self._deadline is not None and now >= self._deadline:
            if self._asked or self._sent is not None:
                self._copier.say(_KILLED)
            self._sent = signal.SIGKILL
            self._deadline = None
            self._kill()

    def _end_leftovers(self) -> None:
        """End what the command has left behind: asked first, then killed."""
        left = self._tree.processes()
        if left:
            in_time_of_grace = self._deadline is not None and self._may_save(left)
            if not in_time_of_grace:
                self._deadline = time.monotonic() + _LEFTOVER_SECONDS
            self._tell("leftovers", pids=sorted(left))
            signal_all(left, signal.SIGTERM)
            signal_all(left, signal.SIGCONT)
        while left and self._deadline is not None and time.monotonic() < self._deadline:
            self._wait_once(0.02)
            left = self._tree.processes()
        if left and self._asked:
            self._copier.say(_KILLED)
        self._deadline = None
        self._kill()
        self._reap()

    def _may_save(self, left: set[int]) -> bool:
        """Return whether a trainer is among the processes: the command may have been a shell around it."""
        known = [info for _, info in read_processes(self._run) if info.attempt == self._number]
        return not known or any(info.pid in left for info in known if info.role == "trainer")

    def _kill(self) -> None:
        _, stuck = kill_all(self._tree.processes, _KILL_SECONDS)
        if stuck:
            self._tell("not_killable", pids=sorted(stuck))


def _lives(info: ProcessInfo) -> bool:
    return process_lives(info.pid, info.ticks)
