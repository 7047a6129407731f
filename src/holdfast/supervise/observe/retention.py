"""What holds memory that grows: looked for inside the process, during a few steps, when somebody outside has asked.

Four looks at all objects, one after each step, show which containers, objects and named values grow every time; if
none does, four more looks follow, eight steps apart. If any does, `tracemalloc` remembers for two steps more where
objects are made. Then a walk against the references names what holds them, and the source the line that makes it
grow. It reads only: no random state, no gradient and no mode of torch is touched, and nothing is kept alive.

Does not: decide that memory grows (``memory.leaks`` does, outside the process).
"""

from __future__ import annotations

import gc
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

from holdfast.supervise.observe.retention_census import Census, TooManyError
from holdfast.supervise.observe.retention_findings import Leak, find_leaks
from holdfast.supervise.observe.retention_origin import is_ours

_LOOKS = 4
_TRACED = 2  # strides with tracemalloc, which makes a script slower
_STRIDES = (1, 8)
_FRAMES = 16  # from the line that makes a tensor through a library to the script


class Retention:
    """Traces what memory is held by, each time that it is asked to.

    Args:
        tell: Records an event.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._answered = 0
        self._census: Census | None = None
        self._window = self._until_look = 0
        self._traces = False
        self._steps = 0
        self._seconds = 0.0
        os.register_at_fork(after_in_child=self._end)  # a worker that is forked meanwhile is not to be slow for good

    def after_step(self, requested: int) -> None:
        """Go on with a trace, or begin one.

        Args:
            requested: Number of the newest request; each is answered once.

        Raises:
            Exception: what went wrong in a look; the trace has been given up then.
        """
        if self._census is None:
            if requested == self._answered:
                return
            self._answered = requested
            self._begin()
            return
        self._steps += 1
        self._until_look -= 1
        if self._until_look <= 0:
            self._look()

    def _begin(self) -> None:
        self._steps, self._seconds, self._window = 0, 0.0, 0
        self._census = _new_census()
        self._look()

    def _end(self) -> None:
        self._census = None
        self._stop_tracing()

    def _stop_tracing(self) -> None:
        if self._traces:
            self._traces = False
            tracemalloc.stop()

    def _look(self) -> None:
        census = self._census
        if census is None:
            return
        began = time.monotonic()
        stride = _STRIDES[self._window]
        found: list[Leak] = []
        collects = gc.isenabled()
        gc.disable()  # so that no destructor of the script's runs within
        frames = running_frames()
        try:
            with _plain_tensors():
                if census.looks < _LOOKS:
                    census.look(frames)
                else:
                    found = find_leaks(census, frames, stride * (_LOOKS - 1))
                    census.looks += 1
        except TooManyError as error:
            self._end()
            self._tell("leak_trace", found=0, steps=self._steps, why=str(error), request=self._answered)
            return
        except BaseException:
            self._end()
            raise
        finally:
            frames.clear()
            if collects:
                gc.enable()
        self._seconds += time.monotonic() - began
        self._go_on(census, stride, found)

    def _go_on(self, census: Census, stride: int, found: list[Leak]) -> None:
        """Decide what comes next."""
        if census.looks < _LOOKS:
            self._until_look = stride
        elif census.looks == _LOOKS and census.grows():
            self._until_look = _TRACED * stride
            if not tracemalloc.is_tracing():
                tracemalloc.start(_FRAMES)
                self._traces = True
        elif any(leak.matters for leak in found) or self._window + 1 == len(_STRIDES):
            self._end()
            for leak in found:
                self._tell("leak", **leak.facts())
            self._tell(
                "leak_trace",
                found=len(found), steps=self._steps, seconds=round(self._seconds, 3), request=self._answered,
            )  # fmt: skip
        else:
            self._stop_tracing()
            self._window += 1
            self._census = _new_census()
            self._until_look = 1


def _new_census() -> Census:
    torch: Any = sys.modules["torch"]
    return Census(tensor=torch.Tensor, array=getattr(sys.modules.get("numpy"), "ndarray", None))


def _plain_tensors() -> Any:
    """Return a context in which attributes of tensors are read without code of their classes."""
    return sys.modules["torch"]._C.DisableTorchFunctionSubclass()


def running_frames() -> list[FrameType]:
    """Return the frames of all threads, the innermost of this one first, without those of ours."""
    tops = [sys._getframe(), *sys._current_frames().values()]
    found = []
    seen = set()
    for top in tops:
        frame: FrameType | None = top
        while frame is not None and id(frame) not in seen:
            seen.add(id(frame))
            if not is_ours(frame.f_code.co_filename):
                found.append(frame)
            frame = frame.f_back
    return found
