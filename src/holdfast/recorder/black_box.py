"""What one process records: a ring of steps and a ring of events, under one directory.

Steps are frequent and of fixed size; events are rare, of any size, and must not be pushed out by
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
from holdfast.recorder.ring import RingWriter
from holdfast.recorder.run_files import Optimizers

STEPS_FILE, EVENTS_FILE = "steps.ring", "events.ring"
# mark | which of loss and norm are values, also if NaN; optimizer | samples a pass, step, loss,
# norm, seconds
STEP = struct.Struct("<HHIQddd")
_pack_step = STEP.pack
PART = struct.Struct("<HH")
PART_BYTES = 480
LOSS_IS_READ, NORM_IS_READ = 1, 2
_MOST_PARTS = 64


class StepMark(IntEnum):
    """What a record in the ring of steps says."""

    BEGUN = 1
    COMMITTED = 2
    SKIPPED = 3


class EventRing:
    """Write the events of one process into a directory; OSError as `RingWriter`.

    `capacity` is in parts: 512 of them take 254 KiB, and an exception takes about 4.
    """

    def __init__(self, directory: Path, *, capacity: int = 512) -> None:
        self._ring = RingWriter(
            directory / EVENTS_FILE, payload_bytes=PART.size + PART_BYTES, capacity=capacity
        )
        self.moved_aside = self._ring.moved_aside

    def event(self, event: Event) -> None:
        """Record one event; facts that are too long to keep whole are cut and marked as cut."""
        data = _encode(event, event.data)
        if len(data) > PART_BYTES * _MOST_PARTS:
            data = _encode(event, {"cut": str(dict(event.data))[: PART_BYTES * _MOST_PARTS // 8]})
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
    # Keys that are no text, circles: never the run's problem
    except (TypeError, ValueError, RecursionError):
        return json.dumps(
            [*head, {"unreadable": list(map(str, facts))}], separators=(",", ":")
        ).encode()


class BlackBox:
    """Write steps and events of one process, into two files of a directory that is made if missing.

    OSError if the files cannot be created or their 3 MiB cannot be allocated.
    """

    def __init__(self, directory: Path) -> None:
        make_folder(directory.parent, directory.name)
        self._steps = RingWriter(
            directory / STEPS_FILE, payload_bytes=STEP.size, capacity=32_768, has_history=True
        )
        self._events = EventRing(directory, capacity=2_048)
        self.optimizers = Optimizers(directory)
        found = {STEPS_FILE: self._steps.moved_aside, EVENTS_FILE: self._events.moved_aside}
        self.moved_aside = [f"{name} begins anew: {why}" for name, why in found.items() if why]
        """What lay in place of a file and could not be continued, one sentence for each."""

    def step(
        self,
        mark: StepMark,
        global_step: int,
        micro_batch_size: int,
        loss: float | None,
        norm: float | None,
        seconds: float,
        optimizer: int = 0,
    ) -> None:
        """Record one mark of a step; None: that was not read. Cost: below 1 microsecond."""
        is_read = (loss is not None) + 2 * (norm is not None) + (optimizer << 8)
        loss, norm = math.nan if loss is None else loss, math.nan if norm is None else norm
        self._steps.append(
            _pack_step(mark, is_read, micro_batch_size, global_step, loss, norm, seconds)
        )

    def event(self, event: Event) -> None:
        """Record one event; facts that are too long to keep whole are cut and marked as cut."""
        self._events.event(event)

    def close(self) -> None:
        """Unmap both files."""
        self._steps.close()
        self._events.close()
