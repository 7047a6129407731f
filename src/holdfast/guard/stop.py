"""A request to stop: by a signal or by a call, honoured where the state is whole.

The handler notes the request and says so on stderr. It interrupts only what may last long and changes nothing:
waiting for data, and an evaluation. No saving and no agreement between ranks happens in a signal handler. A second
signal ends the process at once, through the kernel: it waits for no boundary and no interpreter.

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

# `timeout` of coreutils signals the process and then its group, some microseconds apart. Slurm sends SIGTERM twice at
# the time limit, systemd sends SIGHUP right after SIGTERM, and launchers pass on what their group gets too. All of
# that is one request: without this wait the second signal would end the process.
_ONE_REQUEST_SECONDS = 0.1

# A shell and `nohup` start a program with these ignored, if it is meant to outlive the terminal or its Ctrl-C.
_STAY_IGNORED = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})

# These are taken over even from a handler in C, since nothing else asks a training run to stop as commonly.
_TAKEN_FROM_NATIVE_CODE = frozenset({signal.SIGTERM, signal.SIGINT})


class Interrupted(BaseException):
    """Raised by the signal handler in the context of a `StopRequest`, and never seen by users."""


class StopRequest:
    """Whether the run shall end, and why.

    Args:
        names: Signals that ask for it, such as ``"SIGTERM"``.
    """

    def __init__(self, names: Iterable[str] = ("SIGTERM",)) -> None:
        self.reason: str | None = None
        self.signal: signal.Signals | None = None
        """The signal that asked the run to end, or None; a request by call has none."""
        self.honoured = False  # a loop has ended because of it
        self.left_alone: list[str] = []
        """Signals that a handler in C keeps, such as one of ``faulthandler.register``."""
        self._numbers = tuple(signal.Signals[name] for name in names)
        self._previous: dict[int, Any] = {}  # what handled each signal before us
        self._installed = False
        self._interruptible = False
        self._may_interrupt: Callable[[], bool] | None = None  # asked when a signal comes; None: it may
        self._settling = False  # the request has just come, and may come once more
        self._process = os.getpid()

    @property
    def by_signal(self) -> bool:
        """Return whether a signal asked the run to end."""
        return self.signal is not None

    @property
    def signal_name(self) -> str | None:
        """Return the name of the signal that asked the run to end, or None."""
        return None if self.signal is None else self.signal.name

    def install(self) -> None:
        """Handle the signals from now on. Without effect outside the main thread, where Python allows none.

        Also without effect once a signal has come, since the next one is to end the process. May be called again: a
        notebook takes SIGINT back after each cell.
        """
        if self.by_signal or threading.current_thread() is not threading.main_thread():
            return
        self.left_alone = []
        for number in self._numbers:
            handler = signal.getsignal(number)
            if self._installed and handler is not signal.default_int_handler:
                continue  # it is ours, or of somebody who may call ours
            if handler is signal.SIG_IGN and number in _STAY_IGNORED:
                continue
            if number not in _TAKEN_FROM_NATIVE_CODE and _is_handled_in_c(number, handler):
                self.left_alone.append(number.name)
                continue
            self._previous[number] = _without_closed(number, handler)
            signal.signal(number, self._on_signal)
        self._installed = True

    def uninstall(self) -> None:
        """Give the signals back to whoever handled them before."""
        if not self._installed:
            return
        self._installed = False
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows no change there; what still comes to us is passed on
        for number, previous in self._previous.items():
            handler = signal.getsignal(number)
            if handler == self._on_signal or (self.by_signal and handler == self._at_the_second(number)):
                signal.signal(number, _without_closed(number, previous))

    def request(self, reason: str) -> None:
        """Ask the run to end; the first reason is kept."""
        self.reason = self.reason or reason

    def begin_anew(self, *, raised: bool = False) -> None:
        """Forget a request that has ended a loop, when another loop begins.

        One by signal is forgotten only if an exception was raised for it: whoever begins a loop after that knows of
        it. Otherwise the script has only run on to its next loop, which is to end too.
        """
        if self.honoured and (raised or not self.by_signal):
            self.reason = None
            self.signal = None
        self.honoured = False

    def __enter__(self) -> None:
        """Let a signal raise `Interrupted` while the context lasts, also one that came before."""
        if self.by_signal:
            raise Interrupted
        self._interruptible = True

    def __exit__(self, *_: object) -> None:
        self._interruptible = False

    @contextmanager
    def interrupting_if(self, allowed: Callable[[], bool]) -> Iterator[None]:
        """Let a signal raise `Interrupted` while the context lasts, if `allowed` returns True when it comes.

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

    # --- in the handler -------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _on_signal_in_a_fork(number)
        elif self._settling:
            return
        elif not self._installed:
            self._pass_by(number, frame)
        elif self.by_signal:  # the second one, from a handler that took our place and passes it on
            _raise_again(number, self._at_the_second(number))
        else:
            self._take(signal.Signals(number), frame)

    def _take(self, number: signal.Signals, frame: FrameType | None) -> None:
        """Note the request, say so, and let the next signal end the process."""
        self._settling = True
        self.signal = number
        self.request(number.name)
        _let_workers_die()
        previous = _without_closed(number, self._previous[number])
        is_of_a_guard = isinstance(_owner(previous), StopRequest)
        following = self._at_the_second(number)
        try:
            if is_of_a_guard:
                previous(number, frame)  # it waits and speaks for both
            else:
                self._settle(number.name, following)
        finally:  # other handlers run and raise meanwhile: workers got the same signal, and are lost
            self._settling = False
            for handled in self._previous:
                if signal.getsignal(handled) == self._on_signal:
                    signal.signal(handled, self._at_the_second(handled))
            if callable(following) and not is_of_a_guard:
                following(number, frame)
            if self._interruptible and (self._may_interrupt is None or self._may_interrupt()):
                self._interruptible = False
                raise Interrupted

    def _pass_by(self, number: int, frame: FrameType | None) -> None:
        """Do what would have been done without us: the guard is closed."""
        previous = _without_closed(number, self._previous.get(number))
        if signal.getsignal(number) == self._on_signal:
            _raise_again(number, previous)
        elif callable(previous):  # somebody passes the signal on to us
            previous(number, frame)

    def _at_the_second(self, number: int) -> Any:
        """Return what a second signal does: call the handler before us, else end the process.

        Not raise a KeyboardInterrupt, which waits for the interpreter, and not nothing: a parent may have ignored the
        signal to survive it itself, as a shell does by ``trap '' USR1``.
        """
        previous = self._previous.get(number)
        owner = _owner(previous)
        if isinstance(owner, StopRequest):
            return owner._at_the_second(number)
        if not callable(previous) or previous is signal.default_int_handler:
            return signal.SIG_DFL
        return previous

    def _settle(self, name: str, following: Any) -> None:
        """Take what comes within a moment for the same request, and say so on stderr."""
        raised: BaseException | None = None
        until = time.monotonic() + _ONE_REQUEST_SECONDS
        try:
            while (left := until - time.monotonic()) > 0:
                try:
                    time.sleep(left)
                except BaseException as error:  # noqa: BLE001 - of another handler, for whom it interrupts
                    raised = error
        finally:
            new_line = "\n" if os.isatty(2) else ""  # after ^C, or a bar
            second = "goes to the handler before holdfast's" if callable(following) else "ends the process at once"
            text = f"{new_line}holdfast: {name}: stops at the next boundary; a second one {second}\n"
            with suppress(OSError):
                os.write(2, text.encode())  # past sys.stderr, which may be in the middle of a write
        if raised is not None:
            raise raised


def _owner(handler: Any) -> Any:
    """Return the object whose method a handler is, or None."""
    return getattr(handler, "__self__", None)


def _without_closed(number: int, handler: Any) -> Any:
    """Return a handler, or what is behind it if it belongs to a closed guard or to the parent of this process."""
    while isinstance(owner := _owner(handler), StopRequest):
        if owner._process != os.getpid():
            return signal.SIG_DFL
        if owner._installed:
            return handler
        handler = owner._previous.get(number)
    return signal.SIG_DFL if handler is None else handler


def _raise_again(number: int, handler: Any) -> None:
    """Have a signal handled by somebody else, and by that from now on."""
    signal.signal(number, handler)
    os.kill(os.getpid(), number)


def _on_signal_in_a_fork(number: int) -> None:
    """Ignore a signal once in a child that inherited the handler, such as a loader worker: it is for the parent.

    A terminal, a scheduler or Slurm's ``--signal`` signals all processes. If workers died of it, the parent could not
    finish its step. SIGTERM ends the child, since that is how a parent ends its children.
    """
    if number == signal.SIGTERM:
        _raise_again(number, signal.SIG_DFL)
    else:
        signal.signal(number, signal.SIG_DFL)


def _is_handled_in_c(number: int, handler: Any) -> bool:
    """Return whether native code handles a signal, such as ``faulthandler.register``, unknown to Python."""
    if handler is None:
        return True
    if handler is not signal.SIG_DFL:
        return False
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _let_workers_die() -> None:
    """Keep torch from raising in the main thread because loader workers got the same signal.

    A scheduler that stops a job sends it to the whole process group. The loop ends at the next boundary.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and getattr(handler, "__module__", "").startswith("torch.utils.data"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    workers = sys.modules.get("holdfast.loader.workers.processes")  # imports torch; without a loader it is not needed
    if workers is not None:
        workers.silence_torch()  # holdfast's handler is around torch's
