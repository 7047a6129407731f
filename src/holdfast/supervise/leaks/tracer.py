"""`LeakTracer`: on request, find out which objects in this process hold growing memory.

The supervisor requests a trace, which spans a few steps. After each step, all objects are measured,
and those that have not grown are dropped. For each remaining object, the tracer follows references
to find the name that holds it and the line that makes it grow. Tracing does not change the state of
the script, including its random state and gradients.
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

# Number of scans before the final one, which also follows references.
_SCANS = 4


@dataclass(slots=True)
class _TraceInProgress:
    """A trace in progress.

    Args:
        request: Number of the request for this trace.
        census: The scans so far.
        steps: Number of steps since the first scan.
        seconds: Time that the trace has taken so far.
    """

    request: int
    census: Census = field(default_factory=Census)
    steps: int = 0
    seconds: float = 0.0


class LeakTracer:
    """Runs a trace each time the supervisor requests one."""

    def __init__(self, emit: Callable[[EventData], None]) -> None:
        self._emit = emit
        # Number of the last request for which a trace was started.
        self._newest_request = 0
        self._trace: _TraceInProgress | None = None

    def after_step(self, request: int) -> None:
        """Continue the current trace, or start one if requested. An error ends the trace.

        Args:
            request: Number of the newest request. A new number starts a new trace.
        """
        trace = self._trace
        if trace is not None:
            trace.steps += 1
        elif request != self._newest_request:
            self._newest_request = request
            trace = _TraceInProgress(request)
        else:
            return
        # Forget the trace before scanning, so that an error ends it.
        self._trace = None
        if self._scan(trace):
            self._trace = trace

    def _scan(self, trace: _TraceInProgress) -> bool:
        """Scan all objects. Return whether the trace continues; report the leaks if it does not."""
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
                    # There is one step between two scans.
                    leaks = find_leaks(census, frames, steps=_SCANS - 1)
                else:
                    census.scan(frames)
        except MemoryError as error:
            why = str(error) or "out of memory"
        finally:
            # A reference to a frame would keep the frame's locals alive.
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
    """Context manager that turns off garbage collection and the code of tensor subclasses."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
            yield
    finally:
        if was_collecting:
            gc.enable()


def _running_frames() -> Frames:
    """Return the frames of all threads, except those that run holdfast's code."""
    frames = {}
    for top in sys._current_frames().values():
        for frame, _ in traceback.walk_stack(top):
            if not frame.f_code.co_filename.startswith(OWN_FOLDER):
                frames[id(frame)] = frame
    return list(frames.values())
