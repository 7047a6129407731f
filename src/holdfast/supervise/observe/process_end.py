"""Record how a process exits: uncaught exceptions, ``sys.exit`` and interpreter exit.

Hooks that the script has already installed are still called. A hook that the script installs later
replaces holdfast's; the exception is then read from ``sys.last_exc`` (before Python 3.12,
``sys.last_value``) when the interpreter exits.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from holdfast.core.importing import ImportWatch
from holdfast.core.raised import describe_exception, printable

if TYPE_CHECKING:
    from holdfast.core.events.data import EventData

# Priority that makes holdfast's finalizer run before multiprocessing's own finalizers, which wait
# for queues and child processes.
_FIRST_FINALIZER = 1_000_000
_OWN_FOLDER = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - in the spelling used by frames
_MAIN_THREAD = "MainThread"


class ProcessEnd:
    """Hooks into all the ways in which this process can exit.

    Args:
        emit: Records an event. Never raises.
        on_exit: Called whenever a hook notices that the process is exiting, possibly several times.
            Its arguments are how the process exits (``"returned"``, ``"exception"`` or
            ``"sys.exit"``), the exit status if known, and the text passed to `sys.exit`.
        watch: Calls a function when a module has been imported.
    """

    def __init__(
        self,
        emit: Callable[[EventData], None],
        on_exit: Callable[[str, int | None, str], None],
        watch: ImportWatch,
    ) -> None:
        self._emit = emit
        self._on_exit = on_exit
        self._reset()
        self._chain_excepthook()
        self._wrap_exit()
        atexit.register(self._leave)
        watch.when_imported("threading", self._hook_into_threads)
        watch.when_imported("multiprocessing.util", self._hook_into_multiprocessing)
        watch.when_imported("traceback", self._hook_into_traceback)

    def _reset(self) -> None:
        self._main_thread = _thread.get_ident()
        # The exception that ends the process.
        self._fatal_error: BaseException | None = None
        self._how = "returned"
        self._status: int | None = None
        # The text that the script passed to `sys.exit`.
        self._exit_text = ""

    def after_fork(self) -> None:
        """In a forked process, forget the exceptions of the parent process."""
        self._reset()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # A child process does not run its parent's finalizers, so add a new one.
            self._add_finalizer(util)

    # --- exceptions ---

    def _chain_excepthook(self) -> None:
        previous = sys.excepthook

        @wraps(previous)
        def excepthook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            self._record_fatal(error, traceback, _MAIN_THREAD)
            previous(kind, error, traceback)

        sys.excepthook = excepthook

    def _hook_into_threads(self, threading: Any) -> None:
        previous = threading.excepthook

        @wraps(previous)
        def excepthook(args: Any, /) -> None:
            if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
                name = "unknown" if args.thread is None else args.thread.name
                self._record(args.exc_value, args.exc_traceback, name, fatal=False)
            previous(args)

        threading.excepthook = excepthook
        # Callbacks registered with this function run before Python waits for threads, which may
        # take forever. The function is private, so it may be missing.
        register_atexit = getattr(threading, "_register_atexit", None)
        if register_atexit is not None:
            register_atexit(self._leave)

    def _record_fatal(
        self, error: BaseException, traceback: TracebackType | None, thread: str
    ) -> None:
        """Record the exception that ends the process, unless it is already recorded."""
        if error is self._fatal_error:
            return
        self._fatal_error = error
        self._how = "exception"
        self._record(error, traceback, thread, fatal=True)

    def _record(
        self, error: BaseException, traceback: TracebackType | None, thread: str, *, fatal: bool
    ) -> None:
        # Suppress all errors, because the script's own hook must still be called.
        with suppress(Exception):
            # A module-level import would slow down the startup of every process.
            from holdfast.core.events.process_events import ExceptionRaised

            facts = describe_exception(error, traceback, without=_OWN_FOLDER)
            self._emit(ExceptionRaised(**facts, thread=thread, fatal=fatal))

    # --- exits ---

    def _wrap_exit(self) -> None:
        """Wrap `sys.exit` to store its argument, but only for calls in the main thread.

        In any other thread, `sys.exit` ends only that thread.
        """
        original = sys.exit

        @wraps(original)
        def exit(status: Any = None, /) -> Any:  # noqa: A001 - the wrapped function has this name
            if _thread.get_ident() == self._main_thread:
                self._note_exit(status)
            original(status)

        sys.exit = exit

    def _note_exit(self, status: Any) -> None:
        """Store the argument of `sys.exit`: a status, a message (status 1) or None (status 0)."""
        self._how = "sys.exit"
        self._status = status if isinstance(status, int) else int(status is not None)
        self._exit_text = printable(status) if type(status) is str else ""

    def _leave(self) -> None:
        """Report that the process is exiting. Python may still wait for threads afterward."""
        last_error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # If a hook of the script has replaced holdfast's, this exception is not recorded yet.
        if isinstance(last_error, BaseException):
            self._record_fatal(last_error, last_error.__traceback__, _MAIN_THREAD)
        self._on_exit(self._how, self._status, self._exit_text)

    # --- child processes of multiprocessing, which exit through `os._exit` ---

    def _hook_into_multiprocessing(self, util: ModuleType) -> None:
        self._add_finalizer(util)
        util.register_after_fork(self, lambda process_end: process_end._add_finalizer(util))

    def _add_finalizer(self, util: ModuleType) -> None:
        """Report the exit of a child process before its other finalizers run.

        Up to Python 3.12, finalizers run while the exception that ends the child is being handled,
        so `sys.exc_info` returns it.
        """
        # If the parent forked while it was handling an exception, `sys.exc_info` returns that
        # exception, which does not end the child.
        inherited_error = sys.exc_info()[1]

        def leave() -> None:
            error = sys.exc_info()[1]
            if isinstance(error, SystemExit):
                self._note_exit(error.code)
            elif error is not None and error is not inherited_error:
                name = sys.modules["multiprocessing.process"].current_process().name
                self._record_fatal(error, error.__traceback__, name)
            self._leave()

        util.Finalize(None, leave, exitpriority=_FIRST_FINALIZER)

    def _hook_into_traceback(self, traceback: Any) -> None:
        """Record the exception that ends a child process when its traceback is printed.

        This is needed since Python 3.13, in which the exception is no longer being handled when the
        finalizers run.
        """
        previous = traceback.print_exc

        @wraps(previous)
        def print_exc(*args: Any, **options: Any) -> None:
            error = sys.exc_info()[1]
            caller = sys._getframe(1).f_globals
            if error is not None and caller.get("__name__") == "multiprocessing.process":
                name = caller["current_process"]().name
                self._record_fatal(error, error.__traceback__, name)
            previous(*args, **options)

        traceback.print_exc = print_exc
