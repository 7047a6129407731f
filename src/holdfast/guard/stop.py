"""A request to stop the run, by a signal or by a call, which the loop honours at its next boundary.

The signal handler only notes the request and prints a line on stderr. It saves nothing and does not
talk to other ranks. It interrupts only what may last long and changes no state: waiting for data,
and an evaluation. A second signal ends the process at once: the kernel's default action is in place
by then, which needs no interpreter.

    stop = StopRequest(("SIGTERM", "SIGINT"))
    stop.install()
    while stop.reason is None:
        ...
    stop.uninstall()
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

# Signals within this time are one request. `timeout` of coreutils signals the process and then its
# group, a few microseconds apart. Slurm sends SIGTERM twice at the time limit, systemd sends SIGHUP
# right after SIGTERM, and launchers forward signals that their whole group got. Otherwise the
# second signal would end the process.
_ONE_REQUEST_SECONDS = 0.1

# A shell and `nohup` start a program with these ignored if it is to outlive the terminal or its
# Ctrl-C.
_STAY_IGNORED = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})

# These two are the usual way to stop a training run, so they replace even a handler in C.
_TAKEN_FROM_NATIVE_CODE = frozenset({signal.SIGTERM, signal.SIGINT})


class Interrupted(BaseException):
    """Raised by the signal handler within ``with stop_request:``.

    The guard catches it; users never see it.
    """


class StopRequest:
    """Whether the run was asked to stop, and why.

    As a context manager it lets a signal interrupt its body with `Interrupted`.

    Args:
        names: The signals that stop the run, such as ``"SIGTERM"``.
    """

    def __init__(self, names: Iterable[str] = ("SIGTERM",)) -> None:
        self.reason: str | None = None
        self.signal: signal.Signals | None = None
        """The signal that asked the run to stop, or None if a call did."""
        self.rank: int | None = None
        """The rank that was asked to stop, if the run has several."""
        self.honoured = False
        """Whether a loop has ended because of the request."""
        self.left_alone: list[str] = []
        """Names of the signals that stay with a handler in C, such as that of
        ``faulthandler.register``."""
        self._numbers = tuple(signal.Signals[name] for name in names)
        # The handlers that were in place before ours, by signal.
        self._previous: dict[int, Any] = {}
        self._installed = False
        self._interruptible = False
        # Asked when a signal comes whether it may interrupt what it comes into; None means that it
        # may.
        self._may_interrupt: Callable[[], bool] | None = None
        # True for a moment after the first signal, in which further signals belong to the same
        # request.
        self._settling = False
        # Forked children inherit the handlers, and must not act on them.
        self._process = os.getpid()

    @property
    def by_signal(self) -> bool:
        """Return whether a signal asked the run to stop."""
        return self.signal is not None

    @property
    def signal_name(self) -> str | None:
        """Return the name of the signal that asked the run to stop, or None."""
        return None if self.signal is None else self.signal.name

    def install(self) -> None:
        """Install the signal handlers.

        Does nothing outside the main thread, where Python allows no handlers, and nothing after a
        stop signal has come, since the next one must end the process. May be called again: a
        notebook resets SIGINT after each cell.
        """
        if self.by_signal or threading.current_thread() is not threading.main_thread():
            return
        self.left_alone = []
        for number in self._numbers:
            handler = signal.getsignal(number)
            if self._installed and handler is not signal.default_int_handler:
                # The handler is ours, or one that was installed later and may call ours.
                continue
            if handler is signal.SIG_IGN and number in _STAY_IGNORED:
                continue
            if number not in _TAKEN_FROM_NATIVE_CODE and _is_handled_in_c(number, handler):
                self.left_alone.append(number.name)
                continue
            self._previous[number] = _open_handler(number, handler)
            signal.signal(number, self._on_signal)
        self._installed = True

    def uninstall(self) -> None:
        """Put the previous handlers back."""
        if not self._installed:
            return
        self._installed = False
        if threading.current_thread() is not threading.main_thread():
            # Python allows no change of handlers here. From now on `_on_signal` forwards to the
            # previous ones.
            return
        for number, previous in self._previous.items():
            handler = signal.getsignal(number)
            if handler == self._on_signal or (
                self.by_signal and handler == self._handler_of_second_signal(number)
            ):
                signal.signal(number, _open_handler(number, previous))

    def request(self, reason: str) -> None:
        """Ask the run to stop. The first reason is kept."""
        self.reason = self.reason or reason

    def reset(self, *, raised: bool = False) -> None:
        """Forget a request that has ended a loop, when another loop begins.

        A signal stops the whole script, so its request also ends the loops that follow. It is
        forgotten only if the script begins another loop although it got an exception.

        Args:
            raised: Whether an exception was raised because of the request.
        """
        if self.honoured and (raised or not self.by_signal):
            self.reason = None
            self.signal = None
            self.rank = None
        self.honoured = False

    def __enter__(self) -> None:
        """Let a signal raise `Interrupted` in the body.

        Raise it at once if one has come already.
        """
        if self.by_signal:
            raise Interrupted
        self._interruptible = True

    def __exit__(self, *_: object) -> None:
        self._interruptible = False

    @contextmanager
    def interrupting_if(self, allowed: Callable[[], bool]) -> Iterator[None]:
        """Let a signal raise `Interrupted` while the context lasts, if `allowed` returns True when
        it comes.

        Otherwise the request waits for the next boundary.
        """
        if self.by_signal and not allowed():
            yield
            return
        self._may_interrupt = allowed
        try:
            with self:
                yield
        finally:
            self._may_interrupt = None

    # --- in the handler

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _on_signal_in_a_fork(number)
        elif self._settling:
            return
        elif not self._installed:
            self._forward(number, frame)
        elif self.by_signal:
            # A handler that replaced ours has forwarded the second signal to us.
            _raise_again(number, self._handler_of_second_signal(number))
        else:
            self._note_request(signal.Signals(number), frame)

    def _note_request(self, number: signal.Signals, frame: FrameType | None) -> None:
        """Note the request, announce it on stderr, and let the next signal end the process."""
        self._settling = True
        self.signal = number
        self.request(number.name)
        _tolerate_dying_workers()
        previous = _open_handler(number, self._previous[number])
        belongs_to_guard = isinstance(_owner(previous), StopRequest)
        second_handler = self._handler_of_second_signal(number)
        try:
            if belongs_to_guard:
                # The outer guard waits for further signals and prints the line for both.
                previous(number, frame)
            else:
                self._settle(number.name, second_handler)
        finally:
            # While this handler waited, another one may have raised: loader workers got the same
            # signal, and torch's SIGCHLD handler raises when one dies.
            self._settling = False
            for handled in self._previous:
                if signal.getsignal(handled) == self._on_signal:
                    signal.signal(handled, self._handler_of_second_signal(handled))
            if callable(second_handler) and not belongs_to_guard:
                second_handler(number, frame)
            if self._interruptible and (self._may_interrupt is None or self._may_interrupt()):
                self._interruptible = False
                raise Interrupted

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Leave a signal to the previous handler, since the guard is closed."""
        previous = _open_handler(number, self._previous.get(number))
        if signal.getsignal(number) == self._on_signal:
            _raise_again(number, previous)
        elif callable(previous):
            # A handler that was installed after ours has called us.
            previous(number, frame)

    def _handler_of_second_signal(self, number: int) -> Any:
        """Return the handler of a second signal.

        That of the script, or SIG_DFL, which ends the process.

        SIG_DFL also replaces the handler that raises KeyboardInterrupt, which would wait for the
        interpreter, and SIG_IGN: a parent may have ignored the signal only to survive it itself, as
        a shell does by ``trap '' USR1``.
        """
        previous = self._previous.get(number)
        owner = _owner(previous)
        if isinstance(owner, StopRequest):
            return owner._handler_of_second_signal(number)
        if not callable(previous) or previous is signal.default_int_handler:
            return signal.SIG_DFL
        return previous

    def _settle(self, name: str, second_handler: Any) -> None:
        """Wait for further signals of the same request, and then announce it on stderr.

        An exception that another signal handler raises meanwhile is raised again at the end.
        """
        raised: BaseException | None = None
        deadline = time.monotonic() + _ONE_REQUEST_SECONDS
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                try:
                    time.sleep(remaining)
                except BaseException as error:  # noqa: BLE001 - another handler may raise anything
                    raised = error
        finally:
            # A terminal shows ^C or a progress bar on the current line.
            new_line = "\n" if os.isatty(2) else ""
            if callable(second_handler):
                consequence = "goes to the previously installed handler"
            else:
                consequence = "ends the process at once"
            text = (
                f"{new_line}holdfast: {name}: stops at the next boundary; a second one"
                f" {consequence}\n"
            )
            with suppress(OSError):
                # Not through sys.stderr, which the signal may have interrupted in the middle of a
                # write.
                os.write(2, text.encode())
        if raised is not None:
            raise raised


def _owner(handler: Any) -> Any:
    """Return the object whose bound method a handler is, or None."""
    return getattr(handler, "__self__", None)


def _open_handler(number: int, handler: Any) -> Any:
    """Return a handler, or the one behind it if it belongs to a closed guard or to the parent of
    this process.
    """
    while isinstance(owner := _owner(handler), StopRequest):
        if owner._process != os.getpid():
            return signal.SIG_DFL
        if owner._installed:
            return handler
        handler = owner._previous.get(number)
    return signal.SIG_DFL if handler is None else handler


def _raise_again(number: int, handler: Any) -> None:
    """Install another handler for a signal and send the signal to this process again."""
    signal.signal(number, handler)
    os.kill(os.getpid(), number)


def _on_signal_in_a_fork(number: int) -> None:
    """Ignore the first signal in a forked child that inherited the handler, such as a loader
    worker.

    A terminal, a scheduler or Slurm's ``--signal`` signals all processes, and means the parent. If
    its workers died, it could not finish its step. SIGTERM ends the child, since that is how a
    parent ends its children.
    """
    if number == signal.SIGTERM:
        _raise_again(number, signal.SIG_DFL)
    else:
        signal.signal(number, signal.SIG_DFL)


def _is_handled_in_c(number: int, handler: Any) -> bool:
    """Return whether native code, such as ``faulthandler.register``, handles a signal, which Python
    does not know.

    The kernel lists the signals that a process handles as a mask in the line ``SigCgt`` of
    ``/proc/self/status``.
    """
    if handler is None:
        return True
    if handler is not signal.SIG_DFL:
        return False
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _tolerate_dying_workers() -> None:
    """Keep torch from raising in the main thread when loader workers die of the same signal.

    A scheduler that stops a job signals its whole process group. The loop ends at the next boundary
    anyway.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and getattr(handler, "__module__", "").startswith("torch.utils.data"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Not imported here: importing it in a signal handler could take seconds, and without it there
    # are no workers.
    child_signals = sys.modules.get("holdfast.loader.workers.child_signals")
    if child_signals is not None:
        # Its SIGCHLD handler wraps torch's.
        child_signals.silence_torch()
