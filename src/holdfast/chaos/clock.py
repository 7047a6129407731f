"""Shift the time that Python code of this process sees.

The kernel has one clock for all processes.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import gc
import time
from functools import partial
from typing import Any


def shift(seconds: int) -> None:
    """Let `time` and `datetime` return a current time that is so many seconds later."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + seconds * 10**9
    for name, at, now in (
        ("localtime", 0, "time"),
        ("gmtime", 0, "time"),
        ("ctime", 0, "time"),
        ("asctime", 0, "localtime"),
        ("strftime", 1, "localtime"),
    ):
        setattr(time, name, partial(_with_now, getattr(time, name), at, getattr(time, now)))
    # `today` asks `time.time`; the others are changed in the class, which extension modules know by
    # its address.
    fields = gc.get_referents(dt.datetime.__dict__)[0]
    fields["now"] = classmethod(lambda cls, tz=None: cls.fromtimestamp(time.time(), tz))
    fields["utcnow"] = classmethod(
        lambda cls: cls.fromtimestamp(time.time(), dt.UTC).replace(tzinfo=None)
    )
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(dt.datetime))


def _with_now(function: Any, at: int, now: Any, *given: Any) -> Any:
    """Call a function of a time, of now where none is given in its place."""
    return (
        function(*given[:at], now()) if len(given) <= at or given[at] is None else function(*given)
    )
