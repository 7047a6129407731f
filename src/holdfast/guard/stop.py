"""How the training process handles SIGTERM, SIGUSR1, SIGHUP and Ctrl-C.

`Policy.stop_signals` determines which signals stop a run. The script can also request a stop by
calling `Guard.request_stop`, and `holdfast stop` requests one from outside (``outside_requests``).
`StopRequest` holds the request and the signal handler:

1. **The first signal** is stored and announced on stderr, and the script's own handler is called,
   if there is one. Our handler neither saves nor contacts other ranks. At its next boundary, the
   loop reads `StopRequest.reason`, saves a checkpoint and ends (``run/loop.py``). `Interrupted` is
   raised only in code that may take long but changes no state: waiting for data, and evaluations.
2. **Signals within the next 0.1 s** count as the same request and are ignored.
3. **A later signal** kills the process immediately, or goes to the script's own handler. For this
   purpose, our handler is replaced after the first signal, normally by the kernel's default action,
   which works even if the interpreter hangs. In a notebook, a second Ctrl-C raises
   KeyboardInterrupt instead, because the end of the process would take all variables with it.
   SIGUSR1 and SIGUSR2 are only warnings, which schedulers and launchers may send repeatedly, so
   they are ignored from then on, until the process ends.
4. **In a forked child**, such as a loader worker, the first signal is ignored, since it was meant
   for the parent. Only SIGTERM ends the child immediately.
5. **After `StopRequest.uninstall`**, the previous handlers are in place again. After a stop by a
   signal, SIGUSR1 and SIGUSR2 stay ignored instead of killing the process while it exits.

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

from holdfast.core.interactive import is_interactive
from holdfast.core.standard_streams import write_to_stderr

# Signals within this time count as one request. The `timeout` command signals the process and then
# its group, a few microseconds apart. Slurm sends SIGTERM twice at the time limit, systemd sends
# SIGHUP right after SIGTERM, and launchers forward signals that their whole group has already
# received. Without this window, the second signal would kill the process.
_ONE_REQUEST_SECONDS = 0.1

# If a program is meant to survive a Ctrl-C or the closing of its terminal, a shell or `nohup`
# starts it with these signals ignored. The guard leaves them ignored.
_STAY_IGNORED = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})

# Schedulers send these signals as a warning before they end a job, and nothing else uses them to
# kill a process. A launcher may forward them to processes that have already received them.
_WARNINGS = frozenset({signal.SIGUSR1, signal.SIGUSR2})

# These two signals are the usual way to stop training, so our handler replaces even a handler that
# native code has installed.
_TAKEN_FROM_NATIVE_CODE = frozenset({signal.SIGTERM, signal.SIGINT})

_STDERR_DESCRIPTOR = 2


class Interrupted(BaseException):
    """Raised by the signal handler inside ``with stop_request:``.

    The guard catches this exception, so users never see it.
    """


class StopRequest:
    """The request to stop a run, and the signal handlers that receive it.

    Used as a context manager, it lets a signal interrupt the body by raising `Interrupted`.

    Args:
        names: The names of the signals that stop the run, such as ``"SIGTERM"``.
        note_signal: Function that the handler calls with the name of the first signal, to record
            it. None if it is not recorded.
    """

    def __init__(
        self,
        names: Iterable[str] = ("SIGTERM",),
        note_signal: Callable[[str], object] | None = None,
    ) -> None:
        # Why the run was asked to stop: the name of a signal, or the reason passed to `request`.
        self.reason: str | None = None
        # The signal that asked the run to stop. None if there was none.
        self.signal: signal.Signals | None = None
        # The rank that received the request, if the run has several ranks.
        self.rank: int | None = None
        # Whether a loop has ended because of the request.
        self._honored = False
        # Whether `request` was called with `ends_process=True`.
        self._ends_process = False
        # The names of signals that keep a handler installed by native code, such as
        # ``faulthandler.register``.
        self.left_alone: list[str] = []

        self._numbers = tuple(signal.Signals[name] for name in names)
        self._note_signal = note_signal
        # The handlers that were installed before ours, keyed by signal.
        self._previous: dict[int, Any] = {}
        self._installed = False
        # True while a signal may raise `Interrupted`.
        self._interruptible = False
        # Decides, when a signal arrives, whether the running code may be interrupted. If None, the
        # code may always be interrupted.
        self._may_interrupt: Callable[[], bool] | None = None
        # True for a moment after the first signal. Signals during that time belong to the same
        # request.
        self._settling = False
        # The PID of the process that installs the handlers. Forked children inherit the handlers
        # but must not stop the run.
        self._process = os.getpid()

    # --- the request

    @property
    def by_signal(self) -> bool:
        """Return whether a signal asked the run to stop."""
        return self.signal is not None

    @property
    def signal_name(self) -> str | None:
        """Return the name of the signal that asked the run to stop, or None."""
        if self.signal is None:
            return None
        return self.signal.name

    @property
    def ends_process(self) -> bool:
        """Return whether the request ends the whole script, and not only its current loop."""
        return self.by_signal or self._ends_process

    @property
    def honored(self) -> bool:
        """Return whether a loop has ended because of the request."""
        return self._honored

    def request(self, reason: str, *, ends_process: bool = False) -> None:
        """Ask the run to stop. If it has already been asked, the first reason is kept.

        Args:
            reason: Why the run stops.
            ends_process: Whether the request ends the whole script, as a signal does, and not only
                its current loop.
        """
        self.reason = self.reason or reason
        self._ends_process = self._ends_process or ends_process

    def honor(self) -> None:
        """Record that the loop ends because of the request."""
        self._honored = True

    def reset(self, *, raised: bool = False) -> None:
        """Clear a request that has ended the previous loop, when another loop begins.

        A signal stops the whole script, so it also ends any later loop. Therefore, such a request
        is cleared only if the script has caught the exception that the stop raised.

        Args:
            raised: Whether the request has caused an exception to be raised.
        """
        if self._honored and (raised or not self.ends_process):
            self.reason = None
            self._ends_process = False
            self.signal = None
            self.rank = None
        self._honored = False

    # --- code that a signal may interrupt

    def __enter__(self) -> None:
        """Let a signal raise `Interrupted` in the body. If one has already arrived, raise now."""
        if self.by_signal:
            raise Interrupted
        self._interruptible = True

    def __exit__(self, *_: object) -> None:
        self._interruptible = False

    @contextmanager
    def interrupting_if(self, allowed: Callable[[], bool]) -> Iterator[None]:
        """Let a signal raise `Interrupted` in the body if `allowed` returns True when it arrives.

        If `allowed` returns False, the loop honors the request at its next boundary. A request that
        has already ended a loop does not interrupt the code after that loop.
        """
        has_ended_a_loop = self.by_signal and self._honored
        if has_ended_a_loop or (self.by_signal and not allowed()):
            yield
            return
        self._may_interrupt = allowed
        try:
            with self:
                yield
        finally:
            self._may_interrupt = None

    # --- installing the handlers

    def install(self) -> None:
        """Install the signal handlers.

        This does nothing outside the main thread, since Python allows setting handlers only in the
        main thread. It does nothing after a stop signal either, since the next signal must kill the
        process. It must be called repeatedly, because a notebook resets SIGINT after each cell.
        """
        if self.by_signal or threading.current_thread() is not threading.main_thread():
            return
        self.left_alone = []
        for number in self._numbers:
            self._take_over(number)
        self._installed = True

    def _take_over(self, number: signal.Signals) -> None:
        """Install our handler for a signal, unless the existing handler must stay."""
        handler = signal.getsignal(number)
        if self._installed and handler is not signal.default_int_handler:
            # The handler is ours, or was installed later and may call ours.
            return
        if handler is signal.SIG_IGN and number in _STAY_IGNORED:
            return
        if number not in _TAKEN_FROM_NATIVE_CODE and _is_handled_in_c(number, handler):
            self.left_alone.append(number.name)
            return
        self._previous[number] = _active_handler(number, handler)
        signal.signal(number, self._on_signal)

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        if not self._installed:
            return
        self._installed = False
        if threading.current_thread() is not threading.main_thread():
            # Python does not allow changing handlers in other threads. From now on, `_on_signal`
            # forwards signals to the previous handlers.
            return
        for number, previous in self._previous.items():
            if self._has_installed(number, signal.getsignal(number)):
                signal.signal(number, self._handler_after(number, previous))

    def _handler_after(self, number: int, previous: Any) -> Any:
        """Return the handler that a signal has after `uninstall`."""
        handler = _active_handler(number, previous)
        if self.by_signal and number in _WARNINGS and handler is signal.SIG_DFL:
            # The script is about to end, and a launcher may still forward the signal.
            return signal.SIG_IGN
        return handler

    def _has_installed(self, number: int, handler: Any) -> bool:
        """Return whether `handler` is ours, or the one that we install for a second signal."""
        if handler == self._on_signal:
            return True
        return self.by_signal and handler == self._handler_of_second_signal(number)

    # --- in the handler

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal according to the cases in the module's docstring."""
        if os.getpid() != self._process:
            _on_signal_in_a_fork(number)
        elif self._settling:
            return
        elif not self._installed:
            self._forward(number, frame)
        elif any(request.by_signal for request in self._with_outer_requests(number)):
            # A handler that was installed over ours has forwarded the second signal to us.
            _raise_again(number, self._handler_of_second_signal(number))
        else:
            self._note_request(signal.Signals(number), frame)

    def _note_request(self, number: signal.Signals, frame: FrameType | None) -> None:
        """Store the request, announce it on stderr, and prepare for a second signal."""
        requests = self._with_outer_requests(number)
        for request in requests:
            request._settling = True
            request.signal = number
            request.request(number.name)
            if request._note_signal is not None:
                # Nothing can be recorded when a second signal kills the process.
                request._note_signal(number.name)
        _tolerate_dying_workers()

        try:
            _wait_for_signals_of_the_same_request()
        finally:
            # The rest must run even if another signal's handler has raised during the wait: loader
            # workers receive the same signal, and torch's SIGCHLD handler raises when one of them
            # dies.
            for request in requests:
                request._settling = False
                request._prepare_for_second_signal()
            # The announcement comes last, because a user who reads it may send the second signal
            # immediately.
            second_handler = self._handler_of_second_signal(number)
            _announce(number.name, second_handler)
            if callable(second_handler) and second_handler is not signal.default_int_handler:
                second_handler(number, frame)
            _interrupt_one_of(requests)

    def _with_outer_requests(self, number: int) -> list[StopRequest]:
        """Return this request and those of other open guards whose handlers ours has replaced."""
        requests = [self]
        outer = _guard_of(_active_handler(number, self._previous.get(number)))
        if outer is not None:
            requests += outer._with_outer_requests(number)
        return requests

    def _prepare_for_second_signal(self) -> None:
        """Replace our handlers with those for a second signal."""
        for number in self._previous:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, self._handler_of_second_signal(number))

    def _handler_of_second_signal(self, number: int) -> Any:
        """Return the script's own handler, SIG_DFL, which kills the process, or SIG_IGN.

        Except in a notebook, SIG_DFL also replaces Python's handler that raises KeyboardInterrupt,
        which would have to wait for the interpreter. It replaces SIG_IGN too, since the parent
        process may have ignored the signal only to survive it itself, as a shell does with ``trap
        '' USR1``.
        """
        previous = self._previous.get(number)
        outer_guard = _guard_of(previous)
        if outer_guard is not None:
            return outer_guard._handler_of_second_signal(number)
        if previous is signal.default_int_handler and is_interactive():
            return previous
        has_own_handler = callable(previous) and previous is not signal.default_int_handler
        if has_own_handler:
            return previous
        if number in _WARNINGS:
            return signal.SIG_IGN
        return signal.SIG_DFL

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the previous handler, because this guard is closed."""
        previous = _active_handler(number, self._previous.get(number))
        if signal.getsignal(number) == self._on_signal:
            _raise_again(number, previous)
        elif callable(previous):
            # A handler that was installed over ours has called ours.
            previous(number, frame)


def _wait_for_signals_of_the_same_request() -> None:
    """Sleep for `_ONE_REQUEST_SECONDS`, during which `StopRequest._on_signal` ignores signals.

    If the handler of another signal raises an exception during the sleep, the sleep is completed
    first, and then the exception is raised.
    """
    raised: BaseException | None = None
    deadline = time.monotonic() + _ONE_REQUEST_SECONDS
    remaining_seconds = _ONE_REQUEST_SECONDS
    while remaining_seconds > 0:
        try:
            time.sleep(remaining_seconds)
        except BaseException as error:  # noqa: BLE001 - another handler may raise anything
            raised = error
        remaining_seconds = deadline - time.monotonic()
    if raised is not None:
        raise raised


def _announce(signal_name: str, second_handler: Any) -> None:
    """Print on stderr that the run will stop, and what a second signal would do."""
    if second_handler is signal.default_int_handler:
        consequence = "raises KeyboardInterrupt at once"
    elif callable(second_handler):
        consequence = "goes to the previously installed handler"
    else:
        consequence = "ends the process at once"
    second = "SIGTERM" if second_handler is signal.SIG_IGN else "a second signal"
    text = f"holdfast: {signal_name}: stopping at the next boundary; {second} {consequence}\n"
    if os.isatty(_STDERR_DESCRIPTOR):
        # The terminal's current line may already show ^C or a progress bar.
        text = "\n" + text
    write_to_stderr(text)


def _interrupt_one_of(requests: Iterable[StopRequest]) -> None:
    """Raise `Interrupted` if one of the requests allows interrupting the running code."""
    for request in requests:
        if request._interruptible and (request._may_interrupt is None or request._may_interrupt()):
            request._interruptible = False
            raise Interrupted


def _guard_of(handler: Any) -> StopRequest | None:
    """Return the stop request that owns a signal handler, or None for any other handler."""
    owner = getattr(handler, "__self__", None)
    if isinstance(owner, StopRequest):
        return owner
    return None


def _active_handler(number: int, handler: Any) -> Any:
    """Return a handler or, if it belongs to a closed guard, the handler that it had replaced.

    SIG_DFL is returned for a handler that was inherited from a guard in the parent process.
    """
    guard = _guard_of(handler)
    while guard is not None:
        if guard._process != os.getpid():
            return signal.SIG_DFL
        if guard._installed:
            return handler
        handler = guard._previous.get(number)
        guard = _guard_of(handler)
    if handler is None:
        return signal.SIG_DFL
    return handler


def _raise_again(number: int, handler: Any) -> None:
    """Install another handler for a signal, and send the signal to this process again."""
    signal.signal(number, handler)
    os.kill(os.getpid(), number)


def _on_signal_in_a_fork(number: int) -> None:
    """Handle a signal in a forked child: SIGTERM kills it, and the first other signal is ignored.

    A terminal, a scheduler or Slurm's ``--signal`` sends a signal to all processes although it is
    meant for the parent, which could not finish its step if its workers died. SIGTERM kills the
    child, since a parent uses it to terminate its children. Warnings are ignored however often they
    come.
    """
    if number == signal.SIGTERM:
        _raise_again(number, signal.SIG_DFL)
    elif number not in _WARNINGS:
        signal.signal(number, signal.SIG_DFL)


def _is_handled_in_c(number: int, handler: Any) -> bool:
    """Return whether native code, which Python does not know about, handles a signal.

    ``faulthandler.register`` installs such a handler. The line ``SigCgt`` in ``/proc/self/status``
    is a hexadecimal bit mask of the signals that the process handles.
    """
    if handler is None:
        return True
    if handler is not signal.SIG_DFL:
        return False
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                handled_signals = int(line.split()[1], 16)
                # Signal numbers start at 1, but the bits of the mask start at 0.
                return bool(handled_signals >> (number - 1) & 1)
    return False


def _tolerate_dying_workers() -> None:
    """Keep torch from raising in the main thread when the same signal kills loader workers.

    A scheduler that stops a job signals the whole process group. Losing the workers does no harm,
    since the loop ends at its next boundary.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and getattr(handler, "__module__", "").startswith("torch.utils.data"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The module is looked up rather than imported, because an import in a signal handler could take
    # seconds. If it was never imported, there are no workers.
    child_signals = sys.modules.get("holdfast.loader.workers.child_signals")
    if child_signals is not None:
        # Its SIGCHLD handler wraps torch's.
        child_signals.silence_torch()
