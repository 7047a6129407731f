"""`LeakTracer`: find out inside the process what holds growing memory, on request.

The supervisor requests a trace, which spans a few steps. After each step all objects are examined
to see what has grown every time. What still grows at the end is followed to what holds it and to
the line that makes it grow. Tracing only reads: it touches neither the random state nor gradients.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable

from holdfast.core.events.data import EventData
from holdfast.core.events.process_events import Leak, LeakTrace
from holdfast.supervise.leaks.census import Census, Frames
from holdfast.supervise.leaks.findings import find_leaks
from holdfast.supervise.leaks.introspection import OWN_FOLDER

# How many looks precede the one that follows references.
_LOOKS = 4


class LeakTracer:
    """Traces what holds memory, each time that a trace is requested.

    Args:
        emit: Records an event.
    """

    def __init__(self, emit: Callable[[EventData], None]) -> None:
        self._emit = emit
        # Number of the newest request for which a trace was started.
        self._request = 0
        # The current trace, the steps since its first look, and the seconds it has taken so far.
        self._census: Census | None = None
        self._steps = 0
        self._seconds = 0.0

    def after_step(self, request: int) -> None:
        """Continue the current trace or start one; an error ends the trace.

        Args:
            request: Number of the newest request. Every request is answered once.
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
        """Take the next look; after the last one, report the leaks."""
        began_at = time.monotonic()
        # Clear the trace first, so that an error leaves it ended.
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
    """Take a look and return None; at the last look, return the leaks."""
    was_collecting = gc.isenabled()
    # Otherwise destructors of the script could run during the look.
    gc.disable()
    frames = _running_frames()
    try:
        # Read attributes of tensors without calling code of tensor subclasses.
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
            if census.looks < _LOOKS:
                census.look(frames)
                return None
            return find_leaks(census, frames, steps=_LOOKS - 1)
    finally:
        # A stored frame would keep its locals alive.
        frames.clear()
        if was_collecting:
            gc.enable()


def _running_frames() -> Frames:
    """Return the frames of all threads, except our own frames."""
    frames = {}
    for top in sys._current_frames().values():
        for frame, _ in traceback.walk_stack(top):
            if not frame.f_code.co_filename.startswith(OWN_FOLDER):
                frames[id(frame)] = frame
    return list(frames.values())
