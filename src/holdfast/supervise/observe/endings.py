"""How a process ends: uncaught exceptions, of threads too, ``sys.exit``, and leaving as such.

Every hook of the script's is called as it would be without us, and one that the script sets later
replaces ours: then what Python keeps of the last exception is read when the interpreter leaves.
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
    from holdfast.core.events.event import EventData

_FIRST = 1_000_000  # before the finalizers of multiprocessing, which wait for queues and children
_OURS = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - as it stands in a frame


class Endings:
    """Watch for the end of this process."""

    def __init__(
        self,
        emit: Callable[[EventData], None],
        leaves: Callable[[str, int | None, str], None],
        watch: ImportWatch,
    ) -> None:
        self._emit, self._leaves = emit, leaves
        self._begin()
        self._chain_excepthook()
        self._wrap_exit()
        atexit.register(self._leave)
        watch.when_imported("threading", self._on_threading)
        watch.when_imported("multiprocessing.util", self._on_multiprocessing)
        watch.when_imported("traceback", self._on_traceback)

    def _begin(self) -> None:
        self._main_thread = _thread.get_ident()
        self._fatal: BaseException | None = None
        self._how, self._said = "returned", ""
        self._status: int | None = None

    def after_fork(self) -> None:
        """Begin anew in a forked process; what its parent met is not its own."""
        self._begin()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            self._finalize(util)  # those of the parent do nothing here

    def _chain_excepthook(self) -> None:
        previous = sys.excepthook

        @wraps(previous)
        def excepthook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            self._is_fatal(error, traceback, "MainThread")
            previous(kind, error, traceback)

        sys.excepthook = excepthook

    def _is_fatal(self, error: BaseException, traceback: TracebackType | None, thread: str) -> None:
        if error is not self._fatal:
            self._fatal, self._how = error, "exception"
            self._record(error, traceback, thread, fatal=True)

    def _record(
        self, error: BaseException, traceback: TracebackType | None, thread: str, *, fatal: bool
    ) -> None:
        # `emit` notes what goes wrong, and the script's own hook must be called
        with suppress(Exception):
            # Not at every start of a process
            from holdfast.core.events.process_events import ExceptionRaised

            facts = describe_exception(error, traceback, without=_OURS)
            self._emit(ExceptionRaised(**facts, thread=thread, fatal=fatal))

    def _on_threading(self, threading: Any) -> None:
        previous = threading.excepthook

        @wraps(previous)
        def excepthook(args: Any, /) -> None:
            if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
                name = "unknown" if args.thread is None else args.thread.name
                self._record(args.exc_value, args.exc_traceback, name, fatal=False)
            previous(args)

        threading.excepthook = excepthook
        # Before threads are waited for, which may take for ever; where Python has it, it has it
        # under this name.
        getattr(threading, "_register_atexit", lambda _: None)(self._leave)

    def _wrap_exit(self) -> None:
        original = sys.exit

        @wraps(original)
        def exit(status: Any = None, /) -> Any:  # noqa: A001 - its name
            if _thread.get_ident() == self._main_thread:
                self._exits(status)
            original(status)

        sys.exit = exit

    def _exits(self, status: Any) -> None:
        self._how, self._status = (
            "sys.exit",
            status if isinstance(status, int) else int(status is not None),
        )
        self._said = printable(status) if type(status) is str else ""

    def _leave(self) -> None:
        """Record the end, each time that it is met.

        At the first, some things are still to be waited for.
        """
        last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(last, BaseException):  # of a script whose own hook has replaced ours
            self._is_fatal(last, last.__traceback__, "MainThread")
        self._leaves(self._how, self._status, self._said)

    def _on_traceback(self, traceback: Any) -> None:
        """Hook into the end of a child of multiprocessing from Python 3.13 on.

        Its finalizers run too late there.
        """
        previous = traceback.print_exc

        @wraps(previous)
        def print_exc(*args: Any, **named: Any) -> None:
            error, caller = sys.exc_info()[1], sys._getframe(1)
            if error is not None and caller.f_globals.get("__name__") == "multiprocessing.process":
                self._is_fatal(
                    error, error.__traceback__, caller.f_globals["current_process"]().name
                )
            previous(*args, **named)

        traceback.print_exc = print_exc

    def _on_multiprocessing(self, util: ModuleType) -> None:
        self._finalize(util)
        util.register_after_fork(self, lambda endings: endings._finalize(util))

    def _finalize(self, util: ModuleType) -> None:
        """Hook into the end of a child of multiprocessing.

        It leaves by ``os._exit``, after finalizers that run while its exception is the current one
        up to Python 3.12.
        """
        inherited = sys.exc_info()[1]  # of a parent that forked while it handled one

        def leave() -> None:
            error = sys.exc_info()[1]
            if isinstance(error, SystemExit):
                self._exits(error.code)
            elif error is not None and error is not inherited:
                name = sys.modules["multiprocessing.process"].current_process().name
                self._is_fatal(error, error.__traceback__, name)
            self._leave()

        util.Finalize(None, leave, exitpriority=_FIRST)
