"""`LeakTracer`: find out inside the process what holds growing memory, on request.

The supervisor requests a trace, which spans a few steps. After each step all objects are examined
to see what has grown every time. For what still grows at the end, references are followed to find
out what holds it and which line makes it grow. Tracing only reads: it touches neither the random
state nor gradients.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast.core.events.data import EventData
from holdfast.core.events.process_events import Leak, LeakTrace
from holdfast.supervise.leaks.census import Census, Frames
from holdfast.supervise.leaks.findings import find_leaks
from holdfast.supervise.leaks.introspection import OWN_FOLDER

# How many scans precede the one that follows references.
_SCANS = 4


@dataclass(slots=True)
class _TraceInProgress:
    """A trace: its request, the steps since its first scan, and the time it has taken."""

    request: int
    census: Census = field(default_factory=Census)
    steps: int = 0
    seconds: float = 0.0


class LeakTracer:
    """Traces what holds memory, each time that a trace is requested."""

    def __init__(self, emit: Callable[[EventData], None]) -> None:
        self._emit = emit
        # Number of the newest request for which a trace was started.
        self._newest_request = 0
        self._trace: _TraceInProgress | None = None

    def after_step(self, request: int) -> None:
        """Continue the trace in progress, or start one; an error ends the trace.

        Args:
            request: Number of the newest request. Every request is answered once.
        """
        trace = self._trace
        if trace is not None:
            trace.steps += 1
        elif request != self._newest_request:
            self._newest_request = request
            trace = _TraceInProgress(request)
        else:
            return
        # Cleared first, so that an error leaves the trace ended.
        self._trace = None
        if self._scan(trace):
            self._trace = trace

    def _scan(self, trace: _TraceInProgress) -> bool:
        """Scan all objects and return whether the trace continues; if not, report the leaks."""
        began_at = time.monotonic()
        census = trace.census
        is_last = census.scans == _SCANS
        frames: Frames = []
        leaks: list[Leak] = []
        why = ""
        try:
            with _script_code_disabled():
                frames = _running_frames()
                if is_last:
                    leaks = find_leaks(census, frames, steps=_SCANS - 1)
                else:
                    census.scan(frames)
        except MemoryError as error:
            why = str(error) or "no memory left"
        finally:
            # A stored frame would keep its locals alive.
            frames.clear()
        trace.seconds += time.monotonic() - began_at
        nothing_grows = census.scans == _SCANS and not census.grown
        if not (is_last or why or nothing_grows):
            return True
        for leak in leaks:
            self._emit(leak)
        self._emit(
            LeakTrace(
                found=len(leaks),
                steps=trace.steps,
                seconds=round(trace.seconds, 3),
                request=trace.request,
                why=why,
            )
        )
        return False


@contextmanager
def _script_code_disabled() -> Iterator[None]:
    """Context manager in which neither destructors nor tensor subclasses of the script run."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
            yield
    finally:
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
