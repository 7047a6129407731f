"""Shift the clock for the Python code in this process.

The kernel's clock cannot be shifted, because all processes share it. Instead, this module replaces
functions of `time` and `datetime`. C code and file timestamps still use the true time.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import gc
import time
from collections.abc import Callable
from typing import Any

NANOSECONDS = 10**9


def shift(seconds: int) -> None:
    """Shift the current time, as returned by `time` and `datetime`.

    Args:
        seconds: The shift in seconds. If it is negative, the time is set back.
    """
    true_time = time.time
    true_time_ns = time.time_ns
    time.time = lambda: true_time() + seconds
    time.time_ns = lambda: true_time_ns() + seconds * NANOSECONDS
    # These functions use the current time if the argument at `position` is missing.
    for name in ("localtime", "gmtime", "ctime"):
        _use_current_time(name, position=0, now=time.time)
    _use_current_time("asctime", position=0, now=time.localtime)
    _use_current_time("strftime", position=1, now=time.localtime)
    # `date.today` and `datetime.today` call `time.time`, so they need no replacement. `now` and
    # `utcnow` must be replaced in the existing `datetime` class, because extension modules hold
    # pointers to it. Python does not allow assignment to attributes of this class, so change the
    # class dictionary instead.
    class_dict = gc.get_referents(dt.datetime.__dict__)[0]
    class_dict["now"] = classmethod(lambda cls, tz=None: cls.fromtimestamp(time.time(), tz))
    class_dict["utcnow"] = classmethod(
        lambda cls: cls.fromtimestamp(time.time(), dt.UTC).replace(tzinfo=None)
    )
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(dt.datetime))


def _use_current_time(name: str, *, position: int, now: Callable[[], Any]) -> None:
    """Make a function of `time` use `now()` if its argument at `position` is missing or None."""
    original = getattr(time, name)

    def with_current_time(*arguments: Any) -> Any:
        if len(arguments) > position and arguments[position] is not None:
            return original(*arguments)
        return original(*arguments[:position], now())

    setattr(time, name, with_current_time)
