"""Recognise exceptions that a signal handler has raised while other code was running.

A handler runs wherever the main thread happens to be, possibly in the middle of a sample's code. If
it raises, for instance through ``sys.exit()`` at SIGTERM, the sample is not at fault. Code that
handles exceptions of samples must re-raise such an exception.
"""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch.utils.data import get_worker_info

# Signals with which a sample may limit its own time. Their handlers belong to the sample.
_TIMER_SIGNALS = {signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}

# The code of the signal handlers that were installed when the epoch began.
_noted_handlers: set[CodeType] = set()


def note_handlers() -> None:
    """Remember the handlers that are installed now.

    Many handlers start by replacing themselves, so they could not be found later.
    """
    _noted_handlers.clear()
    _noted_handlers.update(_current_handlers())


def let_through(error: BaseException) -> None:
    """Re-raise an exception if a signal handler has raised it or its cause.

    In a worker, nothing is raised: a signal sent to a worker is not meant for the training run.
    """
    if get_worker_info() is None and is_from_handler(error):
        raise error


def is_from_handler(error: BaseException) -> bool:
    """Return whether a signal handler has raised an exception or its cause."""
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
    """Yield the code of a handler, which is a function, a partial or an object that is callable."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return
    for function in (handler, type(handler).__call__):
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield code
