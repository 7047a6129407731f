"""An exception that a signal's handler raised wherever the main thread was by then, such as in a
sample's code.

It is neither the sample's, nor of whatever else may fail there without an end to training.
"""

from __future__ import annotations

import functools
import signal
import traceback
from types import CodeType

from torch.utils.data import get_worker_info

# By which a sample limits its own time
_TIMERS = {signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}
_seen: set[CodeType] = set()


def note_handlers() -> None:
    """Remember the handlers that there are.

    Many a handler begins by putting another one in its place.
    """
    _seen.clear()
    _seen.update(_handlers())


def _handlers() -> set[CodeType]:
    found = set()
    for number in signal.valid_signals() - _TIMERS:
        handler = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        for each in (handler, type(handler).__call__) if callable(handler) else ():
            if isinstance(code := getattr(each, "__code__", None), CodeType):
                found.add(code)
    return found


def came_of_a_handler(error: BaseException) -> bool:
    """Return whether a handler of a signal raised an exception or its cause."""
    handlers, seen = _seen | _handlers(), set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(cause.__traceback__)):
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def let_through(error: BaseException) -> None:
    """Raise an exception again if a handler of a signal raised it or its cause, such as
    ``sys.exit()`` at SIGTERM.

    A handler runs wherever the main thread is, so also in the middle of a sample. Whoever deals
    with what samples raise would take it for one of theirs, try again, and go on. In a worker a
    signal is no request to the training.
    """
    if get_worker_info() is None and came_of_a_handler(error):
        raise error
