"""Read what a process recorded, even if it was killed in the middle of a write.

Torn slots, truncated ends of files, and events whose first part was overwritten are skipped. A file
that is not a ring, or has a newer version, is an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.events.event import Event
from holdfast.recorder.black_box import EVENTS_FILE, PART, STEP, STEPS_FILE, StepMark
from holdfast.recorder.progress import sample_of
from holdfast.recorder.ring import (
    LOSS_IS_READ,
    NORM_IS_READ,
    OPTIMIZER_SHIFT,
    Record,
    read_ring,
    value_or_none,
)
from holdfast.recorder.run_files import SAMPLES_FILE

_MARKS = frozenset(StepMark)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One recorded mark of a step."""

    mark: StepMark
    # Optimizer steps committed.
    global_step: int
    # The most samples in one forward/backward pass, 0 if unknown.
    micro_batch_size: int
    # Mean loss of the step. None if it was not read: a NaN is a loss that is NaN.
    loss: float | None
    # Global norm before clipping, None if it was not read.
    grad_norm: float | None
    # Duration of the step.
    seconds: float
    # When the mark was written.
    unix_seconds: float
    # The number of the optimizer that stepped, see `Optimizers`; 0 if there is only one.
    optimizer: int = 0


def read_steps(directory: Path) -> list[StepRecord]:
    """Return the recorded marks of steps, oldest first.

    Raises:
        RunDirectoryError: H305, as `read_ring`.
    """
    marks = [step_record_in(record) for record in read_ring(directory / STEPS_FILE)]
    return [mark for mark in marks if mark is not None]


def step_record_in(record: Record) -> StepRecord | None:
    """Decode a record of the ring of steps; return None if it belongs to another kind of ring."""
    if len(record.payload) != STEP.size:
        # The header is damaged.
        return None
    mark, flags, micro_batch_size, global_step, loss, norm, seconds = STEP.unpack(record.payload)
    if mark not in _MARKS:
        return None
    return StepRecord(
        mark=StepMark(mark),
        global_step=global_step,
        micro_batch_size=micro_batch_size,
        loss=value_or_none(loss, flags & LOSS_IS_READ),
        grad_norm=value_or_none(norm, flags & NORM_IS_READ),
        seconds=seconds,
        unix_seconds=record.nanoseconds / 1e9,
        optimizer=flags >> OPTIMIZER_SHIFT,
    )


def describe_lost_steps(directory: Path) -> str:
    """Describe in one clause which steps of a process are no longer recorded.

    Empty if all are recorded, at least in the history.
    """
    for name in (SAMPLES_FILE, STEPS_FILE):
        records = read_ring(directory / name)
        if records and records[0].sequence > 1:
            return _overwritten_steps(directory / name, oldest=records[0])
    return ""


def _overwritten_steps(path: Path, oldest: Record) -> str:
    # Imported here because numpy takes a tenth of a second.
    from holdfast.recorder.history import read_history

    history = read_history(path)
    not_in_history = max(oldest.sequence - 1 - history.newest, 0)
    lost = history.missing + not_in_history
    if not lost:
        return ""
    return (
        f"the steps before step {_step_of(oldest):,} are no longer recorded:"
        f" {lost:,} older records were overwritten"
    )


def _step_of(record: Record) -> int:
    sample = sample_of(record)
    if sample is not None:
        return sample.step
    mark = step_record_in(record)
    return 0 if mark is None else mark.global_step


def read_events(directory: Path) -> list[Event]:
    """Return the recorded events, oldest first.

    Raises:
        RunDirectoryError: H305, as `read_ring`.
    """
    parts = EventParts()
    events = [parts.add(record) for record in read_ring(directory / EVENTS_FILE)]
    return [event for event in events if event is not None]


class EventParts:
    """Joins the parts of events. Parts that were overwritten, torn or damaged are skipped."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._previous_sequence = 0

    def add(self, record: Record) -> Event | None:
        """Add the next record, and return the event that it completes, or None."""
        if len(record.payload) < PART.size:
            return None
        index, count = PART.unpack_from(record.payload)
        is_next = len(self._parts) == index and record.sequence == self._previous_sequence + 1
        if index == 0 or not is_next:
            self._parts = []
        if index != 0 and not is_next:
            # The beginning of this event was overwritten or torn.
            return None
        self._previous_sequence = record.sequence
        self._parts.append(record.payload[PART.size :])
        if len(self._parts) != count:
            return None
        return _decode(b"".join(self._parts))


def _decode(data: bytes) -> Event | None:
    try:
        kind, global_step, unix_seconds, facts = json.loads(data.rstrip(b"\0"))
    except (ValueError, TypeError):
        return None
    if not (isinstance(facts, dict) and isinstance(kind, str)):
        return None
    return Event(kind=kind, global_step=global_step, unix_seconds=unix_seconds, data=facts)
