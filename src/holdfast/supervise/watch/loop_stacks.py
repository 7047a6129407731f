"""`LoopStackSampler`: find out in which Python line a training loop spends its time.

py-spy samples the stacks of the trainer, but only if its loop spends much of its time outside of
backward, optimizer and loader. ``explain.speed`` judges the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.events.process_events import StacksSampled
from holdfast.explain.evidence import (
    Frame,
    innermost_user_frame,
    is_holdfast_code,
    is_user_code,
)
from holdfast.explain.hangs.process_samples import ThreadSample
from holdfast.recorder.progress import LoopTimes
from holdfast.supervise.watch.py_spy import PySpy, find_py_spy

# Stacks are sampled if a loop spends at least this share of its time outside of backward,
# optimizer, loader, evaluation and saving. In a loop that mostly computes, the forward pass takes
# about a third.
_MIN_OWN_SHARE = 0.4
_MIN_LOOP_SECONDS = 2.0
# A sample takes py-spy about 0.03 s of one CPU. The pause between samples doubles after every 16.
_FIRST_PAUSE_SECONDS = 0.4
_SAMPLES_PER_PAUSE = 16
_MAX_SAMPLES = 96
# Give up if py-spy fails this often in a row, for example because tracing is not permitted.
_MAX_FAILURES = 5
# Code of these files shows that the thread is not in the script's own code or in a forward pass.
_OTHER_PARTS = ("/torch/utils/data/", "/torch/autograd/", "/torch/optim/", "/torch/serialization.")


@dataclass(slots=True)
class LoopStacks:
    """How often sampled stacks of a trainer were in Python code of the loop, and at which lines.

    Attributes:
        pid: PID of the trainer.
        samples: Number of samples.
        in_python: Samples in which the main thread executed Python code of the loop itself.
        places: How often each line was the innermost line of user code in these samples.
    """

    pid: int
    samples: int = 0
    in_python: int = 0
    places: Counter[str] = field(default_factory=Counter)

    def add(self, main_thread: ThreadSample) -> None:
        """Add a sample of the main thread."""
        self.samples += 1
        frames = main_thread.frames
        # Operations of torch release the interpreter lock while they compute or wait for a device.
        if not frames or not main_thread.holds_gil:
            return
        if _runs_other_part(frames) or _runs_holdfast(frames):
            return
        self.in_python += 1
        frame = innermost_user_frame(frames)
        self.places[f"{Path(frame.file).name}:{frame.line} in {frame.function}"] += 1


def _runs_other_part(frames: Sequence[Frame]) -> bool:
    """Return whether a thread is in the loader, a backward pass, an optimizer or a save."""
    return any(part in frame.file for frame in frames for part in _OTHER_PARTS)


def _runs_holdfast(frames: Sequence[Frame]) -> bool:
    """Return whether a thread runs code of holdfast, which may call the script's functions.

    The script cannot make this code faster, for example a save between two batches.
    """
    for frame in reversed(frames):
        if is_holdfast_code(frame):
            return True
        if is_user_code(frame):
            return False
    return False


class LoopStackSampler:
    """Samples the stacks of a trainer, at intervals that double."""

    def __init__(self) -> None:
        self._py_spy = PySpy(find_py_spy())
        self._failures_in_a_row = 0
        self._stacks: LoopStacks | None = None
        self._next_sample_at = 0.0

    def update(self, pid: int, loop: LoopTimes, now: float) -> None:
        """Take a sample if one is due, and if the loop spends much of its time in its own code.

        Args:
            pid: PID of the trainer.
            loop: What the loop has spent its time on so far.
            now: The current time in seconds, on any monotonic clock.
        """
        if not self._is_due(loop, now):
            return
        if self._stacks is None or self._stacks.pid != pid:
            self._stacks = LoopStacks(pid)
        if self._stacks.samples >= _MAX_SAMPLES:
            return
        doublings = self._stacks.samples // _SAMPLES_PER_PAUSE
        self._next_sample_at = now + _FIRST_PAUSE_SECONDS * 2**doublings
        self._take_sample(self._stacks)

    def _is_due(self, loop: LoopTimes, now: float) -> bool:
        if now < self._next_sample_at or self._failures_in_a_row >= _MAX_FAILURES:
            return False
        return loop.seconds >= _MIN_LOOP_SECONDS and loop.own_share >= _MIN_OWN_SHARE

    def _take_sample(self, stacks: LoopStacks) -> None:
        threads = self._py_spy.read_threads(stacks.pid, is_stopped=True)
        main_threads = [thread for thread in threads or () if thread.is_main]
        if main_threads:
            self._failures_in_a_row = 0
            stacks.add(main_threads[0])
        else:
            self._failures_in_a_row += 1

    def as_event(self, attempt: int) -> StacksSampled | None:
        """Return the event that records the samples so far, or None if there are none."""
        stacks = self._stacks
        if stacks is None or not stacks.samples:
            return None
        place = ""
        at_place = 0
        if stacks.places:
            [(place, at_place)] = stacks.places.most_common(1)
        return StacksSampled(
            attempt=attempt,
            pid=stacks.pid,
            samples=stacks.samples,
            in_python=stacks.in_python,
            place=place,
            at_place=at_place,
        )
