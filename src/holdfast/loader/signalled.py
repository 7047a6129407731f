"""Recognize exceptions that a signal handler raised while other code was running.

A signal handler can interrupt the main thread anywhere, even while it is loading a sample. If the
handler raises an exception, for example by calling ``sys.exit()`` on SIGTERM, the sample is not at
fault. Code that handles the exceptions of samples must re-raise such an exception.
"""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch.utils.data import get_worker_info

# Signals that a dataset may use to limit the time for reading a sample. An exception raised by one
# of their handlers counts as a failure of the sample.
_TIMER_SIGNALS = {signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}

# Code objects of the signal handlers that were installed at the beginning of the epoch.
_noted_handlers: set[CodeType] = set()


def note_handlers() -> None:
    """Remember the signal handlers that are currently installed.

    Many handlers begin by installing another handler in their place, so by the time they raise an
    exception, they are no longer installed.
    """
    _noted_handlers.clear()
    _noted_handlers.update(_current_handlers())


def let_through(error: BaseException) -> None:
    """Re-raise an exception if it, or its cause, was raised by a signal handler.

    In a worker, this function does nothing, because a signal sent to a worker is not meant for the
    training run.
    """
    if get_worker_info() is None and is_from_handler(error):
        raise error


def is_from_handler(error: BaseException) -> bool:
    """Return whether an exception or its cause was raised by a signal handler."""
    handlers = _noted_handlers | _current_handlers()
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if frame.f_code in handlers:
                return True
        visited.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def _current_handlers() -> set[CodeType]:
    handlers: set[CodeType] = set()
    for number in signal.valid_signals() - _TIMER_SIGNALS:
        handlers.update(_codes_of(signal.getsignal(number)))
    return handlers


def _codes_of(handler: Any) -> Iterator[CodeType]:
    """Yield the code objects of a handler: a function, a partial or any other callable object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return
    for function in (handler, type(handler).__call__):
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield code
