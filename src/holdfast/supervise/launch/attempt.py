"""Serve one attempt of a supervised command: copy its output, shut it down and clean up.

`Attempt.serve` is the supervisor's event loop while the command runs. Everything happens in the
main thread; other threads only pass hangs and messages to it (`report_hang`, `print_message`).

Other modules decide when the command must end (``shutdown``), detect hangs (``watch``), and decide
whether another attempt follows (``restarts``).
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
from holdfast.core.events.data import EventData
from holdfast.core.events.process_events import Hang
from holdfast.recorder.run_files import read_processes
from holdfast.supervise.launch.hosts import Hosts
from holdfast.supervise.launch.output import CommandStreams, OutputCopier
from holdfast.supervise.launch.shutdown import SAME_INTERRUPT_SECONDS, Shutdown, signal_in_status
from holdfast.supervise.launch.signals import TO_HANDLERS, ReceivedSignal, Signals
from holdfast.supervise.process_tree import Tree, kill_all, signal_all

# Interval at which the event loop checks for hangs, failed hosts and deadlines while it is idle.
_TICK_SECONDS = 1.0
_LEFTOVER_TICK_SECONDS = 0.02
# Grace period for processes that outlive the command. All of them should be gone within a second.
_LEFTOVER_SECONDS = 0.4
# How long to repeat SIGKILL until all processes are gone. This takes milliseconds, unless a process
# waits for a device or a network disk.
_KILL_SECONDS = 5.0
# How long to wait for more output after the command has ended: a kernel work queue delivers the
# last bytes of a pseudo-terminal with a delay.
_QUIET_SECONDS = 0.1
# Minimum time limit for a slow reader of the supervisor's output to catch up.
_FLUSH_SECONDS = 5.0
_KILLED = "killed with SIGKILL because it did not exit in time"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How one attempt ended.

    Args:
        status: Exit code of the command, or the negated number of the signal that killed it.
        seconds: How long the command ran.
        requested_by: The signal by which a user or a scheduler requested the end, or None; see
            `Shutdown.requested_by`.
        signal_sent: The last signal that the supervisor sent on its own initiative: after a hang,
            after a failure on another host, or at the end of the grace period. Otherwise None.
        hang: The hang because of which the supervisor ended the attempt, or None.
        failed_elsewhere: If another host ended the attempt before this one did, the reason that the
            other host gave; otherwise None.
    """

    status: int
    seconds: float
    requested_by: int | None = None
    signal_sent: int | None = None
    hang: Hang | None = None
    failed_elsewhere: str | None = None

    @property
    def was_ended_by_supervisor(self) -> bool:
        """Return whether the supervisor ended the command on its own initiative."""
        return self.signal_sent is not None or self.failed_elsewhere is not None

    @property
    def exit_code(self) -> int:
        """Return the exit code as a shell reports it: 128 + n for signal n."""
        return self.status if self.status >= 0 else 128 - self.status


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A running attempt: one start of the command, served until all its processes have ended.

    Args:
        number: Number of the attempt, from 0.
        run_path: The run directory.
        child: The command's process, which leads its own session.
        tree: Finds all processes of the command.
        streams: The command's output streams.
        copier: Copies the command's output.
        signals: Forwards the supervisor's signals. The caller has already entered this context
            manager.
        shutdown: Decides when the command is asked to end and when it is killed.
        emit: Records an event.
        hosts: The other hosts, if the run spans several hosts.
    """

    number: int
    run_path: Path
    child: subprocess.Popen[bytes]
    tree: Tree
    streams: CommandStreams
    copier: OutputCopier
    signals: Signals
    shutdown: Shutdown
    emit: Callable[[EventData], None]
    hosts: Hosts | None = None
    # Other threads add to these queues, and the main thread empties them.
    _reported_hangs: SimpleQueue[Hang] = field(default_factory=SimpleQueue, init=False)
    _messages: SimpleQueue[str] = field(default_factory=SimpleQueue, init=False)
    # See `AttemptEnd`.
    _hang: Hang | None = field(default=None, init=False)
    _failed_elsewhere: str | None = field(default=None, init=False)
    # Message about the grace period, and the monotonic time at which to print it.
    _announcement: str = field(default="", init=False)
    _announce_at: float = field(default=math.inf, init=False)
    _started_at: float = field(default_factory=time.monotonic, init=False)
    _last_tick_at: float = field(default_factory=time.monotonic, init=False)

    # --- called from other threads ---

    def report_hang(self, hang: Hang) -> None:
        """Pass a hang to the main thread, which acts on it. Thread-safe."""
        self._reported_hangs.put(hang)
        self.signals.wake_up()

    def print_message(self, text: str) -> None:
        """Pass a message to the main thread, which prints it. Thread-safe."""
        self._messages.put(text)
        self.signals.wake_up()

    # --- the event loop ---

    def serve(self) -> AttemptEnd:
        """Wait for the command to end, end its remaining processes, and return how it ended."""
        self.signals.attach(self.child.pid)
        while not self._has_exited():
            while not self._serve_output(_TICK_SECONDS):
                # Keep copying output until a tick has passed. A command that prints nonstop can
                # then delay the other checks by at most one tick.
                continue
            self._print_messages()
            self._act_on_hangs()
            self._check_hosts()
            self._enforce_deadlines()
        # The signal that ended the command may have arrived since the last check.
        self._handle_signals()
        self.signals.detach()
        seconds = time.monotonic() - self._started_at
        status = self.child.wait()
        self._end_leftovers(status)
        self.copier.drain(
            quiet_seconds=_QUIET_SECONDS,
            flush_seconds=max(self.shutdown.grace_seconds, _FLUSH_SECONDS),
        )
        self._print_messages()
        return AttemptEnd(
            status=status,
            seconds=seconds,
            requested_by=self.shutdown.requested_by(status),
            signal_sent=self.shutdown.signal_sent,
            hang=self._hang,
            failed_elsewhere=self._failed_elsewhere,
        )

    def _has_exited(self) -> bool:
        """Return whether the command has exited, without reaping it.

        Its PID stays reserved until it is reaped, so no signal can reach an unrelated process.
        """
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.child.pid, options) is not None

    def _serve_output(self, tick_seconds: float) -> bool:
        """Copy output, handle signals, and return whether the caller's other checks are due.

        The checks are due when a signal or another thread has woken the main thread, when a tick
        has passed, or when it is time to kill the command.
        """
        tick_at = min(self._last_tick_at + tick_seconds, self.shutdown.kill_at, self._announce_at)
        poll = select.poll()
        poll.register(self.signals.wake, select.POLLIN)
        for descriptor, events in self.copier.wanted_events():
            poll.register(descriptor, events)
        ready = poll.poll(max(0.0, tick_at - time.monotonic()) * 1e3)
        self.copier.serve(ready)
        now = time.monotonic()
        was_woken = any(descriptor == self.signals.wake for descriptor, _ in ready)
        if now < tick_at and not was_woken:
            return False
        self._last_tick_at = now
        self._handle_signals()
        if time.monotonic() >= self._announce_at:
            self._announce_at = math.inf
            self.copier.print_message(self._announcement)
        return True

    def _print_messages(self) -> None:
        with suppress(Empty):
            while True:
                self.copier.print_message(self._messages.get_nowait())

    # --- signals ---

    def _handle_signals(self) -> None:
        for received in self.signals.take():
            self._on_signal(received)

    def _on_signal(self, received: ReceivedSignal) -> None:
        """React to a signal, which the signal handler has already forwarded if necessary."""
        number = received.number
        if number == signal.SIGCHLD:
            self._reap_orphans()
        elif number == signal.SIGWINCH:
            self._on_resize()
        else:
            self.emit(process_events.Signal(number=number))
            was_requested = self.shutdown.is_requested
            self.shutdown.note_signal(number, received.arrived_at)
            if self.shutdown.is_requested and not was_requested:
                self._plan_announcement(received)

    def _plan_announcement(self, received: ReceivedSignal) -> None:
        """Schedule the message that announces the grace period.

        After Ctrl-C, the message is delayed, because it mentions a second Ctrl-C, which takes
        effect only after `SAME_INTERRUPT_SECONDS`.
        """
        grace = f"{self.shutdown.grace_seconds:g} s"
        name = signal.Signals(received.number).name
        text = f"forwarded {name} to the command; processes still running after {grace} are killed"
        self._announce_at = received.arrived_at
        if received.number == signal.SIGINT:
            text += ", or immediately after a second Ctrl-C"
            self._announce_at += SAME_INTERRUPT_SECONDS
        self._announcement = text

    def _on_resize(self) -> None:
        self.streams.copy_terminal_size()
        # The command has no controlling terminal, so nothing else sends it SIGWINCH.
        if self.signals.command is not None:
            with suppress(OSError):
                os.killpg(self.signals.command, signal.SIGWINCH)

    def _reap_orphans(self) -> None:
        """Reap orphaned descendants that have ended."""
        for pid in self.tree.ended_orphans({self.child.pid}):
            with suppress(OSError):
                os.waitpid(pid, os.WNOHANG)

    # --- ending the command ---

    def _act_on_hangs(self) -> None:
        """Carry out the remedy that the watchdog proposes: wait, continue, terminate or kill."""
        try:
            hang = self._reported_hangs.get_nowait()
        except Empty:
            return
        if hang.remedy == "wait" or self.shutdown.signal_sent is not None:
            return
        self.copier.print_message(hang.sentence)
        if hang.remedy == "continue":
            signal_all({hang.blamed_pid, hang.pid}, signal.SIGCONT)
            return
        self._hang = hang
        if hang.remedy == "end":
            self.shutdown.kill_within(0.0, time.monotonic())
        else:
            self._terminate()

    def _check_hosts(self) -> None:
        """If another host ended the attempt, give the local ranks time to notice and exit."""
        is_ending = self._failed_elsewhere is not None or self.shutdown.is_requested
        if self.hosts is None or is_ending:
            return
        self._failed_elsewhere = self.hosts.find_failure(self.copier.print_message)
        if self._failed_elsewhere is not None:
            self.emit(process_events.EndedElsewhere(why=self._failed_elsewhere))
            self.shutdown.terminate_at = time.monotonic() + self.shutdown.grace_seconds

    def _terminate(self) -> None:
        """Send SIGTERM to the command because the supervisor wants it to end."""
        signal_all([self.child.pid], signal.SIGTERM)
        # A stopped process cannot handle SIGTERM until it continues.
        with suppress(OSError):
            os.killpg(self.child.pid, signal.SIGCONT)
        self.shutdown.note_terminated(time.monotonic())

    def _enforce_deadlines(self) -> None:
        """Ask the command to end, or kill it, if the time to do so has come."""
        shutdown = self.shutdown
        now = time.monotonic()
        if now >= shutdown.terminate_at and shutdown.signal_sent is None:
            self._terminate()
        if now >= shutdown.kill_at:
            was_asked = shutdown.is_requested or shutdown.signal_sent is not None
            shutdown.note_killed()
            self._kill()
            if was_asked:
                self.copier.print_message(_KILLED)

    # --- processes that outlive the command ---

    def _end_leftovers(self, status: int) -> None:
        """End the processes that outlived the command: first SIGTERM, then SIGKILL."""
        self._wait_for_notified_processes(status)
        leftovers = self.tree.processes()
        if leftovers:
            self._ask_leftovers_to_end(leftovers)
        while leftovers and time.monotonic() < self.shutdown.kill_at:
            self._serve_output(_LEFTOVER_TICK_SECONDS)
            leftovers = self.tree.processes()
        self.shutdown.kill_at = math.inf
        self._kill()
        if leftovers and self.shutdown.is_requested:
            self.copier.print_message(_KILLED)
        self._reap_orphans()

    def _ask_leftovers_to_end(self, leftovers: set[int]) -> None:
        """Send SIGTERM to the leftover processes, and set the time at which they are killed."""
        # The command may have been a shell whose trainer is still running. A trainer keeps the
        # grace period of the run, so that it can save a checkpoint.
        trainers = self._trainer_pids()
        may_be_saving = trainers is None or bool(trainers & leftovers)
        if self.shutdown.kill_at == math.inf or not may_be_saving:
            self.shutdown.kill_at = time.monotonic() + _LEFTOVER_SECONDS
        self.emit(process_events.Leftovers(pids=tuple(sorted(leftovers))))
        signal_all(leftovers, signal.SIGTERM)
        signal_all(leftovers, signal.SIGCONT)

    def _wait_for_notified_processes(self, status: int) -> None:
        """After the command has ended, wait for the processes that may still be saving.

        These are the processes that were signaled individually. If the command was killed by a
        signal that schedulers and terminals send to all processes, the trainers have received it
        too. They are not signaled again, because a second signal makes a guard exit immediately.
        """
        notified = set(self.signals.notified)
        if signal_in_status(status) in TO_HANDLERS | {signal.SIGHUP}:
            notified |= self._trainer_pids() or set()
        # This wait has a grace period of its own; processes that remain afterward get the usual
        # grace period.
        kill_at = self.shutdown.kill_at
        self.shutdown.kill_within(self.shutdown.grace_seconds, time.monotonic())
        while notified & self.tree.processes() and time.monotonic() < self.shutdown.kill_at:
            self._serve_output(_LEFTOVER_TICK_SECONDS)
        self.shutdown.kill_at = kill_at

    def _trainer_pids(self) -> set[int] | None:
        """Return the PIDs of this attempt's trainers, or None if no process is observed."""
        processes = [
            info for _, info in read_processes(self.run_path) if info.attempt == self.number
        ]
        if not processes:
            return None
        return {info.pid for info in processes if info.role == "trainer"}

    def _kill(self) -> None:
        _, unkillable = kill_all(self.tree.processes, _KILL_SECONDS)
        if unkillable:
            self.emit(process_events.NotKillable(pids=tuple(sorted(unkillable))))
