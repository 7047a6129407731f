"""One attempt of a supervised command.

Wait for it, serve its output, pass signals on, end it and what it leaves.
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
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from holdfast.core.events import process_events
from holdfast.core.events.event import EventData
from holdfast.core.events.process_events import Hang
from holdfast.recorder.run_files import read_processes
from holdfast.supervise.launch.hosts import Hosts
from holdfast.supervise.launch.output import Copier, Streams
from holdfast.supervise.launch.signals import ASKING_TO_END, PASSED_ON, TO_HANDLERS, Signals
from holdfast.supervise.process_tree import Tree, kill_all, signal_all

_TICK_SECONDS = 1.0
# After the command itself has ended; no process is left 1 s after any death
_LEFTOVER_SECONDS = 0.4
# SIGKILL takes milliseconds, unless the kernel waits for a device or a network disk
_KILL_SECONDS = 5.0
_QUIET_SECONDS = 0.1  # a terminal passes its last bytes on through a work queue of the kernel
_FLUSH_SECONDS = 5.0  # for a slow reader of our own output
_MOST_ASKED = 3  # whoever asks a third time means it, and who presses Ctrl-C a second time
_TWICE_SECONDS = 0.5  # a shell and a wrapper around us may both pass one Ctrl-C on
_SHELL = 128  # a shell reports signal n as status 128 + n
_KILLED = "killed with SIGKILL, since it had not ended when it was asked to"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an attempt ended."""

    status: int  # exit code, negative for a signal
    seconds: float  # how long it ran
    # The signal by which the user or a scheduler asked us to end, or None; see `Attempt._asked_by`.
    asked: int | None
    # The last signal that we sent on our own account, after a hang or a time of grace, or None
    sent: int | None
    hang: Hang | None  # that it was ended for, or None
    elsewhere: str | None = None  # why another host had ended the attempt before, or None


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Serve one command until nothing of it is left."""

    number: int  # from 0
    run: Path
    child: subprocess.Popen[bytes]  # it leads a session of its own
    tree: Tree
    streams: Streams
    copier: Copier
    signals: Signals  # entered already
    grace_seconds: float  # between asking it to end and SIGKILL
    emit: Callable[[EventData], None]
    hosts: Hosts | None = None  # the others, where several hosts run one training
    _hangs: SimpleQueue[Hang] = field(default_factory=SimpleQueue, init=False)
    _lines: SimpleQueue[str] = field(default_factory=SimpleQueue, init=False)
    _hang: Hang | None = field(default=None, init=False)
    _asked: list[int] = field(default_factory=list, init=False)
    _passed_on: list[int] = field(default_factory=list, init=False)
    _interrupted: float | None = field(default=None, init=False)
    _sent: int | None = field(default=None, init=False)
    _elsewhere: str | None = field(default=None, init=False)
    _ask_at: float = field(default=math.inf, init=False)
    _deadline: float = field(default=math.inf, init=False)
    _started: float = field(default_factory=time.monotonic, init=False)
    _last_look: float = field(default_factory=time.monotonic, init=False)

    def take_hang(self, hang: Hang) -> None:
        """Do what is to be done about a hang; from any thread."""
        self._hangs.put(hang)
        self.signals.rouse()

    def take_line(self, text: str) -> None:
        """Print a line of ours; from any thread."""
        self._lines.put(text)
        self.signals.rouse()

    def serve(self) -> End:
        """Wait until the command has ended, end what it leaves, and return how it went."""
        self.signals.attach(self.child.pid)
        # Without taking its status: while it is not waited for, its number cannot become another
        # process's.
        while os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            while not self._wait_once(_TICK_SECONDS):
                continue  # only output, of which there may be much
            self._say_lines()
            self._look_at_hangs()
            self._look_at_hosts()
            self._keep_deadlines()
        self.signals.command = None
        seconds = time.monotonic() - self._started
        status = self.child.wait()
        self._end_leftovers(status)
        self.copier.drain(
            quiet_seconds=_QUIET_SECONDS, flush_seconds=max(self.grace_seconds, _FLUSH_SECONDS)
        )
        self._say_lines()
        return End(
            status=status,
            seconds=seconds,
            asked=self._asked_by(status),
            sent=self._sent,
            hang=self._hang,
            elsewhere=self._elsewhere,
        )

    def _asked_by(self, status: int) -> int | None:
        """Return the signal that asked the command to end, given how it ended; None if none did.

        SIGINT and SIGTERM ask whatever it does then. After SIGHUP the terminal is gone, so that
        nobody sees another start. The others may mean anything, and asked if the command ended of
        one of them.
        """
        if self._asked:
            return self._asked[0]
        if signal.SIGHUP in self._passed_on:
            return signal.SIGHUP
        number = _signal_of(status)
        return number if number in self._passed_on else None

    def _wait_once(self, seconds: float) -> bool:
        """Serve output; return whether there is more to do.

        Somebody woke us, or it is so many seconds later.
        """
        now = time.monotonic()
        until = min(self._last_look + seconds, self._deadline)
        poll = select.poll()
        for descriptor, events in [(self.signals.wake, select.POLLIN), *self.copier.wishes()]:
            poll.register(descriptor, events)
        ready = poll.poll(max(0.0, until - now) * 1e3)
        self.copier.serve(ready)
        now = time.monotonic()
        if now < until and not any(descriptor == self.signals.wake for descriptor, _ in ready):
            return False
        self._last_look = now
        for number in self.signals.take():
            self._on_signal(number)
        return True

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGWINCH:
            self.streams.follow_size()
            if self.signals.command is not None:  # it has no controlling terminal that would say so
                with suppress(OSError):
                    os.killpg(self.signals.command, number)
        else:
            self.emit(process_events.Signal(number=number))
            if number in PASSED_ON:
                self._passed_on.append(number)
            if number in ASKING_TO_END:
                self._on_asked(number)

    def _on_asked(self, number: int) -> None:
        now, again = time.monotonic(), False
        if number == signal.SIGINT:
            again = self._interrupted is not None and now - self._interrupted >= _TWICE_SECONDS
            self._interrupted = now if self._interrupted is None else self._interrupted
        self._asked.append(number)
        self._limit(0.0 if again or len(self._asked) >= _MOST_ASKED else self.grace_seconds)
        if len(self._asked) == 1:
            at_once = ", or at once after a second one" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            self.copier.say(
                f"{name} passed on; what still runs in {self.grace_seconds:g} s is killed{at_once}"
            )

    def _limit(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _reap(self) -> None:
        for pid in self.tree.ended_orphans({self.child.pid}):
            with suppress(OSError):
                os.waitpid(pid, os.WNOHANG)

    def _say_lines(self) -> None:
        with suppress(Empty):
            while True:
                self.copier.say(self._lines.get_nowait())

    def _look_at_hangs(self) -> None:
        try:
            hang = self._hangs.get_nowait()
        except Empty:
            return
        if hang.remedy == "wait" or self._sent is not None:
            return
        self.copier.say(hang.sentence)
        if hang.remedy == "continue":
            signal_all({hang.blamed_pid, hang.pid}, signal.SIGCONT)
            return
        self._hang = hang
        if hang.remedy == "end":
            self._limit(0.0)
        else:
            self._ask_to_end()

    def _ask_to_end(self) -> None:
        self._sent = signal.SIGTERM
        signal_all([self.child.pid], signal.SIGTERM)
        with suppress(OSError):
            os.killpg(self.child.pid, signal.SIGCONT)  # one that is stopped could not answer
        self._limit(self.grace_seconds)

    def _look_at_hosts(self) -> None:
        """Where another host has ended the attempt, give the ranks here time to end by
        themselves.
        """
        if self.hosts is None or self._elsewhere is not None or self._asked:
            return
        self._elsewhere = self.hosts.why_end(self.copier.say)
        if self._elsewhere is not None:
            self.emit(process_events.EndedElsewhere(why=self._elsewhere))
            self._ask_at = time.monotonic() + self.grace_seconds

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        if now >= self._ask_at and self._sent is None:
            self._ask_at = math.inf
            self._ask_to_end()
        if now >= self._deadline:
            if self._asked or self._sent is not None:
                self.copier.say(_KILLED)
            self._sent = signal.SIGKILL
            self._deadline = math.inf
            self._kill()

    def _end_leftovers(self, status: int) -> None:
        """End what the command has left behind: asked first, then killed."""
        self._wait_for_told(status)
        left = self.tree.processes()
        if left:
            # A trainer may save in its time of grace: the command may have been a shell.
            trainers = self._trainers()
            may_save = trainers is None or bool(trainers & left)
            if self._deadline == math.inf or not may_save:
                self._deadline = time.monotonic() + _LEFTOVER_SECONDS
            self.emit(process_events.Leftovers(pids=tuple(sorted(left))))
            signal_all(left, signal.SIGTERM)
            signal_all(left, signal.SIGCONT)
        while left and time.monotonic() < self._deadline:
            self._wait_once(0.02)
            left = self.tree.processes()
        if left and self._asked:
            self.copier.say(_KILLED)
        self._deadline = math.inf
        self._kill()
        self._reap()

    def _trainers(self) -> set[int] | None:
        """Return the pids of the attempt's processes that train.

        None if none of its processes is observed.
        """
        observed = [info for _, info in read_processes(self.run) if info.attempt == self.number]
        return {info.pid for info in observed if info.role == "trainer"} if observed else None

    def _wait_for_told(self, status: int) -> None:
        """Let processes that were told to save do so.

        The command above them, such as a shell, died of the signal.

        They are not asked once more, since a second signal ends a guard at once. A scheduler or a
        terminal has told them itself where the command ended of what these send to all.
        """
        told = set(self.signals.told)
        if _signal_of(status) in TO_HANDLERS | {signal.SIGHUP}:
            told |= self._trainers() or set()
        deadline = self._deadline
        self._limit(self.grace_seconds)
        while told & self.tree.processes() and time.monotonic() < self._deadline:
            self._wait_once(0.02)
        self._deadline = deadline

    def _kill(self) -> None:
        _, stuck = kill_all(self.tree.processes, _KILL_SECONDS)
        if stuck:
            self.emit(process_events.NotKillable(pids=tuple(sorted(stuck))))


def _signal_of(status: int) -> int:
    """Return the signal that ended a command, also as a shell reports it, or a number that is
    none.
    """
    return -status if status < 0 else status - _SHELL
