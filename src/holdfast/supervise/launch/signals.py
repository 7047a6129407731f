"""Forward signals from the supervisor to the command, as a terminal or a scheduler would do.

The command runs in its own session, so signals from the terminal do not reach it directly. The
supervisor forwards each signal exactly once:

SIGINT, SIGQUIT, SIGHUP    to the command's process group, as a terminal sends them
SIGTERM                    to the command only: the signal would kill a loader worker without a
                           handler, whose death would then end the trainer while it is saving
SIGUSR1, SIGUSR2           to the command if it handles them, otherwise to the descendants that do:
                           a signal that the ranks interpret as "save and stop" would kill
                           torchrun and shells

Other modules decide when the command is killed (``shutdown``) and whether it is restarted
(``restarts``).
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from holdfast.supervise.process_tree import (
    Tree,
    catches,
    children_by_parent,
    read_table,
    signal_all,
)

TO_GROUP = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
TO_COMMAND = frozenset({signal.SIGTERM})
TO_HANDLERS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
FORWARDED = TO_GROUP | TO_COMMAND | TO_HANDLERS
# These signals request the end of the command and start its grace period. After any other signal, a
# process that handles it may continue.
ASKING_TO_END = frozenset({signal.SIGINT, signal.SIGTERM})
_READ_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ReceivedSignal:
    """A signal that the supervisor has received, and when, on the clock of `time.monotonic`."""

    number: int
    arrived_at: float


class Signals:
    """Context manager that installs signal handlers and forwards signals to the command.

    `take` returns the signals that have arrived. A signal that is already ignored at startup is
    still ignored, by both the supervisor and the command, so that ``nohup`` works.

    Args:
        tree: Finds the processes of the command, which Ctrl-Z suspends together with the
            supervisor.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        # PID and process group of the command; None before it starts and after it has ended.
        self.command: int | None = None
        # PIDs of descendants that were signaled individually. They may be saving before they exit.
        self.notified: set[int] = set()
        self._received: deque[ReceivedSignal] = deque()
        # Signals received while there was no command to forward them to.
        self._waiting: list[int] = []
        self._previous_handlers: dict[int, Any] = {}
        # A pipe whose reading end, `wake`, becomes readable after a signal or a call to `wake_up`.
        self.wake, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        self._previous_wakeup = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGWINCH, signal.SIGCHLD):
            self._install(number, self._on_signal)
        self._install(signal.SIGTSTP, self._on_suspend)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous_handlers.items():
            # None means that the previous handler was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        # The descriptor may be reused for another file, to which a thread that is still running
        # must not write.
        wake_writer = self._wake_writer
        self._wake_writer = -1
        os.close(self.wake)
        os.close(wake_writer)

    def attach(self, command: int) -> None:
        """Start forwarding signals to this command, beginning with those that are waiting."""
        self.command = command
        self.notified.clear()
        while self._waiting:
            self._forward(self._waiting.pop(0))

    def detach(self) -> None:
        """Stop forwarding signals, because the command has ended."""
        self.command = None

    def wake_up(self) -> None:
        """Wake the main thread. Thread-safe."""
        # If the pipe is full, the main thread wakes up anyway.
        with suppress(OSError):
            os.write(self._wake_writer, b"\0")

    def take(self) -> list[ReceivedSignal]:
        """Return the signals that have arrived since the last call, in order."""
        with suppress(BlockingIOError):
            # If a read fills the buffer, there may be more to read.
            while len(os.read(self.wake, _READ_BYTES)) == _READ_BYTES:
                continue
        self._waiting.clear()
        # A handler may append signals in the meantime, so remove only those that are returned.
        return [self._received.popleft() for _ in range(len(self._received))]

    def _install(self, number: int, handler: Any) -> None:
        previous = signal.getsignal(number)
        # SIGCHLD is always handled, because ignoring it would lose exit statuses.
        if previous is signal.SIG_IGN and number != signal.SIGCHLD:
            return
        self._previous_handlers[number] = previous
        signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal from within the handler, because the main thread may be busy."""
        # The main thread may take the signal much later, so note the time of arrival here.
        self._received.append(ReceivedSignal(number, time.monotonic()))
        if self.command is None:
            self._waiting.append(number)
        else:
            self._forward(number)

    def _forward(self, number: int) -> None:
        if self.command is None:
            return
        if number in TO_GROUP:
            with suppress(OSError):
                os.killpg(self.command, number)
        elif number in TO_COMMAND:
            signal_all([self.command], number)
        elif number in TO_HANDLERS:
            handlers = find_handlers(self.command, number) or {self.command}
            self.notified |= handlers - {self.command}
            signal_all(handlers, number)

    def _on_suspend(self, _number: int, _frame: FrameType | None) -> None:
        """On Ctrl-Z, suspend the command together with the supervisor; continue both together.

        The command is sent SIGSTOP, because the kernel ignores SIGTSTP in a process group whose
        parent is in another session.
        """
        processes = set() if self.command is None else self._tree.processes()
        signal_all(processes, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        signal_all(processes, signal.SIGCONT)


def find_handlers(command: int, number: int) -> set[int]:
    """Return the PIDs of the topmost processes in a command's process tree that handle a signal.

    Their descendants are excluded, because a process that handles the signal is expected to notify
    its own descendants.
    """
    children = children_by_parent(read_table())
    handlers: set[int] = set()
    pids = [command]
    while pids:
        pid = pids.pop()
        if catches(pid, number):
            handlers.add(pid)
        else:
            pids += children.get(pid, ())
    return handlers
