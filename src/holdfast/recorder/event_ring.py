"""A ring of events: JSON, cut into parts of 480 bytes.

Does not: record steps (``black_box`` does, and ``progress`` has samples of them).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.events import Event
from holdfast.recorder.ring import RingWriter

EVENTS_FILE = "events.ring"
PART = struct.Struct("<HH")
PART_BYTES = 480
_CAPACITY = 512  # parts, in 254 KiB: an exception takes about 4
_MOST_PARTS = 64


class EventRing:
    """Write the events of one process.

    Args:
        directory: Where the file lies.
        capacity: Parts that are kept.

    Raises:
        OSError: as `RingWriter`.
    """

    def __init__(self, directory: Path, *, capacity: int = _CAPACITY) -> None:
        self._ring = ring = RingWriter(
            directory / EVENTS_FILE, payload_bytes=PART.size + PART_BYTES, capacity=capacity
        )
        self.moved_aside = ring.moved_aside

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
    except (TypeError, ValueError, RecursionError):  # keys that are no text, circles: never the run's problem
        return json.dumps([*head, {"unreadable": list(map(str, facts))}], separators=(",", ":")).encode()
