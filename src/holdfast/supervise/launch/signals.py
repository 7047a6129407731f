"""Signals to the supervisor.

Passed on to the command as a terminal or a scheduler would send them, exactly once.

The command has a session of its own, so no signal of the terminal reaches it by itself. SIGINT,
SIGQUIT and SIGHUP go
to its process group, as a terminal sends them. SIGTERM goes to the command alone: a loader worker
    without a handler
would die of it, and the trainer of the worker's death, while it saves.

SIGUSR1 and SIGUSR2 go to whoever can use them. That is the command if it handles them, else the
processes below it
that do: torchrun and shells would end of a signal that the ranks take for "save and stop".
"""

from __future__ import annotations

import os
import signal
from collections import deque
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from holdfast.supervise.process_tree import Tree, catches, read_table, signal_all

TO_GROUP = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
TO_COMMAND = frozenset({signal.SIGTERM})
TO_HANDLERS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
PASSED_ON = TO_GROUP | TO_COMMAND | TO_HANDLERS
ASKING_TO_END = frozenset({signal.SIGINT, signal.SIGTERM})
"""After these the command has its time of grace. A process that handles another one may well go on.
"""


class Signals:
    """Pass signals on while the context lasts; what came is read with `take`.

    A signal that is ignored when we start stays so, for the command too: that is what ``nohup``
        asks for.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.command: int | None = None
        """Pid of the command, which leads its process group; None while there is none, or when it
        has ended."""
        self.told: set[int] = set()
        """Pids below the command to which a signal was passed on by itself.

        They may save now, and then end.
        """
        self._received: deque[int] = deque()
        self._waiting: list[int] = []  # received, and not passed on, since there was no command
        self._previous: dict[int, Any] = {}
        self.wake, self._waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """Readable when a signal came, or `rouse` was called."""

    def __enter__(self) -> Self:
        self._wakeup_before = signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        for number in (*PASSED_ON, signal.SIGWINCH, signal.SIGCHLD, signal.SIGTSTP):
            before = signal.getsignal(number)
            # Ignoring it would lose exit statuses
            if before is not signal.SIG_IGN or number == signal.SIGCHLD:
                self._previous[number] = before
                signal.signal(
                    number, self._suspend if number == signal.SIGTSTP else self._on_signal
                )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._previous.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        signal.set_wakeup_fd(self._wakeup_before)
        # A thread that is late must not write to another file
        waking, self._waking = self._waking, -1
        os.close(self.wake)
        os.close(waking)

    def attach(self, command: int) -> None:
        """Pass signals on to a command from now on, and those that came since the last `take`."""
        self.command = command
        self.told.clear()
        while self._waiting:
            self._pass_on(self._waiting.pop(0))

    def rouse(self) -> None:
        """Wake the main thread; from any thread."""
        with suppress(OSError):  # a full pipe wakes as well
            os.write(self._waking, b"\0")

    def take(self) -> list[int]:
        """Return the signals since the last call, in order."""
        with suppress(BlockingIOError):
            while len(os.read(self.wake, 4096)) == 4096:  # one read may leave some
                continue
        self._waiting.clear()
        return [self._received.popleft() for _ in range(len(self._received))]

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Pass it on at once: the main thread may be busy writing to a slow terminal."""
        self._received.append(number)
        if self.command is None:
            self._waiting.append(number)
        else:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self.command is not None and number in TO_GROUP:
            with suppress(OSError):
                os.killpg(self.command, number)
        elif self.command is not None and number in TO_COMMAND:
            signal_all([self.command], number)
        elif self.command is not None and number in TO_HANDLERS:
            handlers = find_handlers(self.command, number) or {self.command}
            self.told |= handlers - {self.command}
            signal_all(handlers, number)

    def _suspend(self, *_: object) -> None:
        """Stop with the command, as Ctrl-Z does, and go on with it.

        Not by SIGTSTP: the kernel ignores it in a process group whose parent is in another session.
        """
        ours = self._tree.processes() if self.command is not None else set()
        signal_all(ours, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        signal_all(ours, signal.SIGCONT)


def find_handlers(command: int, number: int) -> set[int]:
    """Return the uppermost processes of a command's tree that handle a signal, and none below
    these.
    """
    children: dict[int, list[int]] = {}
    for process in read_table().values():
        children.setdefault(process.ppid, []).append(process.pid)
    handlers: set[int] = set()
    waiting = [command]
    while waiting:
        pid = waiting.pop()
        if catches(pid, number):
            handlers.add(pid)
        else:
            waiting += children.get(pid, ())
    return handlers
