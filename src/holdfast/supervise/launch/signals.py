"""Forward signals from the supervisor to the command, as a terminal or a scheduler would.

The command has a session of its own, so no signal of the terminal reaches it directly, and each is
forwarded exactly once:

SIGINT, SIGQUIT, SIGHUP    to the command's process group, as a terminal sends them
SIGTERM                    to the command alone: a loader worker without a handler would die of it,
                           and the trainer of the worker's death, while it saves
SIGUSR1, SIGUSR2           to whoever can use them: the command if it handles them, otherwise the
                           processes below it that do. torchrun and shells would die of a signal
                           that the ranks understand as "save and stop"

Does not: decide when the command is killed (``shutdown``), or whether it starts again
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
# These request the end of the command and start its grace period. A process that handles one of the
# other signals may well continue.
ASKING_TO_END = frozenset({signal.SIGINT, signal.SIGTERM})
_READ_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ReceivedSignal:
    """A signal, and when it arrived, on the clock of `time.monotonic`."""

    number: int
    arrived_at: float


class Signals:
    """Context manager that forwards signals; `take` returns those that have arrived.

    A signal that is ignored when we start stays ignored, by the command too: that is what ``nohup``
    asks for.

    Args:
        tree: The processes of the command, which Ctrl-Z suspends together with us.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        # PID of the command, which leads its process group; None before it starts and after it has
        # ended.
        self.command: int | None = None
        # PIDs of descendants to which a signal was forwarded individually. They may be saving now,
        # and exit afterwards.
        self.notified: set[int] = set()
        self._received: deque[ReceivedSignal] = deque()
        # Signals received while there was no command to forward them to.
        self._waiting: list[int] = []
        self._previous_handlers: dict[int, Any] = {}
        # `wake` is readable when a signal has arrived or `wake_up` was called.
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
            # None means that the handler was not installed by Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        # A late thread must not write to another file that gets the same descriptor.
        wake_writer = self._wake_writer
        self._wake_writer = -1
        os.close(self.wake)
        os.close(wake_writer)

    def attach(self, command: int) -> None:
        """Forward signals to this command from now on, including those that arrived meanwhile."""
        self.command = command
        self.notified.clear()
        while self._waiting:
            self._forward(self._waiting.pop(0))

    def detach(self) -> None:
        """Forward nothing from now on: the command has ended."""
        self.command = None

    def wake_up(self) -> None:
        """Wake the main thread; may be called from any thread."""
        # If the pipe is full, the main thread will wake up anyway.
        with suppress(OSError):
            os.write(self._wake_writer, b"\0")

    def take(self) -> list[ReceivedSignal]:
        """Return the signals that have arrived since the last call, in order."""
        with suppress(BlockingIOError):
            # A read that fills the buffer may have left more to read.
            while len(os.read(self.wake, _READ_BYTES)) == _READ_BYTES:
                continue
        self._waiting.clear()
        # A handler may append meanwhile, so remove only the signals that are returned.
        return [self._received.popleft() for _ in range(len(self._received))]

    def _install(self, number: int, handler: Any) -> None:
        previous = signal.getsignal(number)
        # SIGCHLD is always handled: ignoring it would lose exit statuses.
        if previous is signal.SIG_IGN and number != signal.SIGCHLD:
            return
        self._previous_handlers[number] = previous
        signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Forward immediately, in the handler: the main thread may be busy with a slow terminal."""
        # The main thread may take it much later, so the time is noted here.
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
        """Suspend the command together with us, as Ctrl-Z does, and continue it with us.

        Uses SIGSTOP, because the kernel ignores SIGTSTP in a process group whose parent is in
        another session.
        """
        processes = set() if self.command is None else self._tree.processes()
        signal_all(processes, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        signal_all(processes, signal.SIGCONT)


def find_handlers(command: int, number: int) -> set[int]:
    """Return the topmost processes of a command's tree that handle a signal.

    Descendants of such a process are left out: it is up to their ancestor to notify them.
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
