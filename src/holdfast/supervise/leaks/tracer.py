"""Find out, inside the process, what holds memory that grows; when the supervisor has asked for it.

A trace takes a few steps. Looks at all objects, one after each step, show what grows every time.
What still grows after the last of them is followed to what holds it, and to the line that makes it
grow. It only reads: neither the random state nor a gradient is touched.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable

from holdfast.core.events.event import EventData
from holdfast.core.events.process_events import Leak, LeakTrace
from holdfast.supervise.leaks.census import Census, Frames
from holdfast.supervise.leaks.findings import find_leaks
from holdfast.supervise.leaks.introspection import OWN_FOLDER

# Looks before the one that follows what has grown.
_LOOKS = 4


class LeakTracer:
    """Trace what memory is held by, each time that a trace is requested.

    Args:
        emit: Records an event.
    """

    def __init__(self, emit: Callable[[EventData], None]) -> None:
        self._emit = emit
        # Number of the newest request that was begun.
        self._request = 0
        # The trace under way, the steps since its first look, and the time it took so far.
        self._census: Census | None = None
        self._steps = 0
        self._seconds = 0.0

    def after_step(self, request: int) -> None:
        """Continue a trace, or begin one; an error ends it.

        Args:
            request: Number of the newest request. Each request is answered once.
        """
        if self._census is not None:
            self._steps += 1
        elif request != self._request:
            self._request = request
            self._steps = 0
            self._seconds = 0.0
            self._census = Census()
        if self._census is not None:
            self._look(self._census)

    def _look(self, census: Census) -> None:
        """Take the next look, and report what was found after the last one."""
        began_at = time.monotonic()
        # An error leaves the trace ended.
        self._census = None
        leaks: list[Leak] | None = None
        why = ""
        try:
            leaks = _look_or_find(census)
        except MemoryError as error:
            why = str(error) or "no memory left"
        self._seconds += time.monotonic() - began_at
        may_continue = census.looks < _LOOKS or bool(census.grown)
        if leaks is None and not why and may_continue:
            self._census = census
        else:
            self._report(leaks or [], why)

    def _report(self, leaks: list[Leak], why: str) -> None:
        for leak in leaks:
            self._emit(leak)
        self._emit(
            LeakTrace(
                found=len(leaks),
                steps=self._steps,
                seconds=round(self._seconds, 3),
                request=self._request,
                why=why,
            )
        )


def _look_or_find(census: Census) -> list[Leak] | None:
    """Take one of the first looks, and return None; or find the leaks after them."""
    was_collecting = gc.isenabled()
    # Otherwise a destructor of the script's could run meanwhile.
    gc.disable()
    frames = _running_frames()
    try:
        # Attributes of tensors are read without code of their classes.
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
            if census.looks < _LOOKS:
                census.look(frames)
                return None
            return find_leaks(census, frames, steps=_LOOKS - 1)
    finally:
        # A frame that is kept would keep its locals.
        frames.clear()
        if was_collecting:
            gc.enable()


def _running_frames() -> Frames:
    """Return the frames of all threads, without ours."""
    frames = {}
    for top in sys._current_frames().values():
        for frame, _ in traceback.walk_stack(top):
            if not frame.f_code.co_filename.startswith(OWN_FOLDER):
                frames[id(frame)] = frame
    return list(frames.values())
