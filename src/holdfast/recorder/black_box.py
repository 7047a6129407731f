"""What one process records: a ring of steps and a ring of events, in one directory.

Steps are frequent and of fixed size. Events are rare and of any size, and must not be pushed out by
steps. Both files are allocated when the run starts, so a full disk cannot silence them.

    steps.ring   32,768 marks, 2 MiB: kind, samples per pass, global step, loss, gradient norm,
                 seconds
    events.ring  2,048 parts of 480 bytes, 1 MiB: JSON
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from holdfast.core.events.event import Event
from holdfast.core.files import make_folder
from holdfast.recorder.ring import LOSS_IS_READ, NORM_IS_READ, OPTIMIZER_SHIFT, RingWriter
from holdfast.recorder.run_files import Optimizers

STEPS_FILE = "steps.ring"
EVENTS_FILE = "events.ring"

# A mark of a step: kind, flags, samples per pass, global step, loss, gradient norm, seconds.
STEP = struct.Struct("<HHIQddd")

# A part of an event: its index and the number of parts, before the text.
PART = struct.Struct("<HH")
PART_BYTES = 480
_MOST_PARTS = 64
_MOST_EVENT_BYTES = PART_BYTES * _MOST_PARTS
# Characters kept of the text of facts that are too long. JSON may escape one character with several
# others.
_CUT_CHARACTERS = _MOST_EVENT_BYTES // 8


class StepMark(IntEnum):
    """What a record in the ring of steps marks."""

    BEGUN = 1
    COMMITTED = 2
    SKIPPED = 3


class EventRing:
    """Write the events of one process into a directory.

    Args:
        directory: The directory of the recording.
        capacity: In parts. 512 of them take 254 KiB; an exception takes about 4.

    Raises:
        OSError: As `RingWriter`.
    """

    def __init__(self, directory: Path, *, capacity: int = 512) -> None:
        self._ring = RingWriter(
            directory / EVENTS_FILE, payload_bytes=PART.size + PART_BYTES, capacity=capacity
        )
        self.moved_aside = self._ring.moved_aside

    def event(self, event: Event) -> None:
        """Record one event. Facts that are too long are truncated and marked as such."""
        data = _encode(event, event.data)
        if len(data) > _MOST_EVENT_BYTES:
            data = _encode(event, {"cut": str(dict(event.data))[:_CUT_CHARACTERS]})
        parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
        for index, part in enumerate(parts):
            self._ring.append(PART.pack(index, len(parts)) + part)

    def close(self) -> None:
        """Unmap the file."""
        self._ring.close()


def _encode(event: Event, facts: Mapping[str, Any]) -> bytes:
    head = [event.kind, event.global_step, event.unix_seconds]
    try:
        return json.dumps([*head, dict(facts)], separators=(",", ":"), default=str).encode()
    # The facts have keys that are not text, or contain themselves. Neither may stop a run.
    except (TypeError, ValueError, RecursionError):
        unreadable = {"unreadable": [str(key) for key in facts]}
        return json.dumps([*head, unreadable], separators=(",", ":")).encode()


class BlackBox:
    """Write the steps and events of one process, into a directory that is created if missing.

    Raises:
        OSError: The files cannot be created or their 3 MiB cannot be allocated.
    """

    def __init__(self, directory: Path) -> None:
        make_folder(directory.parent, directory.name)
        self._steps = RingWriter(
            directory / STEPS_FILE, payload_bytes=STEP.size, capacity=32_768, has_history=True
        )
        self._events = EventRing(directory, capacity=2_048)
        self.optimizers = Optimizers(directory)
        # One sentence about each file that could not be continued.
        self.moved_aside: list[str] = []
        for name, ring in ((STEPS_FILE, self._steps), (EVENTS_FILE, self._events)):
            if ring.moved_aside:
                self.moved_aside.append(f"{name} starts over: {ring.moved_aside}")

    def step(  # noqa: PLR0913
        self,
        mark: StepMark,
        global_step: int,
        micro_batch_size: int,
        loss: float | None,
        norm: float | None,
        seconds: float,
        optimizer: int = 0,
    ) -> None:
        """Record one mark of a step. Cost: below 1 microsecond.

        Args:
            mark: What happened.
            global_step: Optimizer steps committed.
            micro_batch_size: Samples per pass, 0 if unknown.
            loss: None if it was not read.
            norm: The gradient norm, None if it was not read.
            seconds: How long the step took.
            optimizer: The number of the optimizer that stepped, see `Optimizers`; 0 if there is
                only one.
        """
        flags = optimizer << OPTIMIZER_SHIFT
        if loss is None:
            loss = math.nan
        else:
            flags |= LOSS_IS_READ
        if norm is None:
            norm = math.nan
        else:
            flags |= NORM_IS_READ
        payload = STEP.pack(mark, flags, micro_batch_size, global_step, loss, norm, seconds)
        self._steps.append(payload)

    def event(self, event: Event) -> None:
        """Record one event. Facts that are too long are truncated and marked as such."""
        self._events.event(event)

    def close(self) -> None:
        """Unmap both files."""
        self._steps.close()
        self._events.close()
