"""Read what a process recorded, also after it was killed in the middle of a write.

Tolerant: torn slots, a wrapped ring, a cut file and events whose first part is overwritten are passed over. A
file that is no ring, or one of a newer version, is said.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.events import Event
from holdfast.recorder.black_box import EVENTS_FILE, PART, STEP, STEPS_FILE, StepMark
from holdfast.recorder.ring import Record, read_ring

_MARKS = frozenset(StepMark)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One mark of a step as it lies in the ring.

    Args:
        mark: What happened.
        global_step: Optimizer steps committed so far.
        micro_batch_size: Most samples in one forward/backward, 0 if unknown.
        loss: Mean loss of the step; NaN if it was not read.
        grad_norm: Global norm before clipping; NaN if it was not read.
        seconds: Duration of the step.
        unix_seconds: When the mark was written.
    """

    mark: StepMark
    global_step: int
    micro_batch_size: int
    loss: float
    grad_norm: float
    seconds: float
    unix_seconds: float


def read_steps(directory: Path) -> list[StepRecord]:
    """Return the recorded marks of steps, oldest first.

    Raises:
        RunDirectoryError: H305, as `read_ring`.
    """
    return [mark for mark in map(mark_of, read_ring(directory / STEPS_FILE)) if mark is not None]


def mark_of(record: Record) -> StepRecord | None:
    """Return what a record of the ring of steps says, None if it is of another kind."""
    if len(record.payload) != STEP.size:
        return None  # of a damaged header
    mark, _, micro_batch_size, global_step, loss, norm, seconds = STEP.unpack(record.payload)
    if mark not in _MARKS:
        return None
    return StepRecord(
        mark=StepMark(mark), global_step=global_step, micro_batch_size=micro_batch_size, loss=loss, grad_norm=norm,
        seconds=seconds, unix_seconds=record.nanoseconds / 1e9,
    )  # fmt: skip


def read_events(directory: Path) -> list[Event]:
    """Return the recorded events, oldest first.

    Raises:
        RunDirectoryError: H305, as `read_ring`.
    """
    parts = EventParts()
    return [event for record in read_ring(directory / EVENTS_FILE) if (event := parts.add(record)) is not None]


class EventParts:
    """Put the parts of events together; what is overwritten, torn or damaged is passed over."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._previous = 0

    def add(self, record: Record) -> Event | None:
        """Take the next record; return the event that it completes, if it does."""
        if len(record.payload) < PART.size:
            return None
        index, count = PART.unpack_from(record.payload)
        if index == 0:
            self._parts = []
        elif len(self._parts) != index or record.sequence != self._previous + 1:
            self._parts = []  # the beginning is gone: overwritten or torn
            return None
        self._previous = record.sequence
        self._parts.append(record.payload[PART.size :])
        return _decode(b"".join(self._parts)) if len(self._parts) == count else None


def _decode(data: bytes) -> Event | None:
    try:
        kind, global_step, unix_seconds, facts = json.loads(data.rstrip(b"\0"))
    except (ValueError, TypeError):
        return None
    if not isinstance(facts, dict) or not isinstance(kind, str):
        return None
    return Event(kind=kind, global_step=global_step, unix_seconds=unix_seconds, data=facts)
