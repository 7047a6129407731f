"""Record the steps and events of one process in two ring files.

Step records are frequent and have a fixed size, whereas events are rare and can have any size.
Events have their own ring, so that step records never overwrite them. Both files are fully
allocated when the run starts, so that recording continues even if the disk becomes full.

    steps.ring   32,768 records, 2 MiB: kind, samples per pass, global step, loss, gradient norm,
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

# The layout of a step record: kind, flags, samples per pass, global step, loss, gradient norm,
# seconds.
STEP = struct.Struct("<HHIQddd")

# An event is split into parts. Each part starts with its index and the event's total number of
# parts.
PART = struct.Struct("<HH")
PART_BYTES = 480
_MOST_PARTS = 64
_MOST_EVENT_BYTES = PART_BYTES * _MOST_PARTS
# If an event is too long, its data is truncated to this many characters. The factor of 8 leaves a
# margin, because JSON may encode one character as several bytes.
_CUT_CHARACTERS = _MOST_EVENT_BYTES // 8


class StepMark(IntEnum):
    """What a step record marks: that the step began, was committed, or was skipped."""

    BEGUN = 1
    COMMITTED = 2
    SKIPPED = 3


class EventRing:
    """Writes the events of one process to ``events.ring``.

    Args:
        directory: The directory to which the process records.
        capacity: How many event parts the ring holds. 512 parts take up 254 KiB. An event that
            records an exception consists of about 4 parts.

    Raises:
        OSError: If the file cannot be created or its space cannot be allocated.
    """

    def __init__(self, directory: Path, *, capacity: int = 512) -> None:
        self._ring = RingWriter(
            directory / EVENTS_FILE, payload_bytes=PART.size + PART_BYTES, capacity=capacity
        )
        self.moved_aside = self._ring.moved_aside

    def event(self, event: Event) -> None:
        """Record one event. Data that is too long is truncated and stored in the field "cut"."""
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
    """Return an event as JSON, with the given data in place of its own data."""
    head = [event.kind, event.global_step, event.unix_seconds]
    try:
        return json.dumps([*head, dict(facts)], separators=(",", ":"), default=str).encode()
    # A key is not a string, or the data contains itself. Such a mistake must not stop a run.
    except (TypeError, ValueError, RecursionError):
        unreadable = {"unreadable": [str(key) for key in facts]}
        return json.dumps([*head, unreadable], separators=(",", ":")).encode()


class BlackBox:
    """Writes the steps and events of one process to files in a directory.

    The directory is created if it does not exist.

    Raises:
        OSError: If the files cannot be created, or if their 3 MiB cannot be allocated.
    """

    def __init__(self, directory: Path) -> None:
        make_folder(directory.parent, directory.name)
        self._steps = RingWriter(
            directory / STEPS_FILE, payload_bytes=STEP.size, capacity=32_768, has_history=True
        )
        self._events = EventRing(directory, capacity=2_048)
        self.optimizers = Optimizers(directory)
        # One sentence for each existing file to which records could not be appended, with the
        # reason.
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
        """Write one step record. This takes less than 1 microsecond.

        Args:
            mark: Whether the step began, was committed or was skipped.
            global_step: The number of optimizer steps committed so far.
            micro_batch_size: The number of samples per forward/backward pass; 0 if unknown.
            loss: The mean loss of the step; None if the loss was not read from the device.
            norm: The gradient norm before clipping; None if it was not read from the device.
            seconds: The duration of the step.
            optimizer: The number of the optimizer that stepped (see `Optimizers`); 0 if the script
                has only one optimizer.
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
        """Record one event. Data that is too long is truncated and stored in the field "cut"."""
        self._events.event(event)

    def close(self) -> None:
        """Unmap both files."""
        self._steps.close()
        self._events.close()
