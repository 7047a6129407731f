"""Read the steps and events that a process recorded, even if it was killed during a write.

Slots that were only partly written, slots that are cut off at the end of a truncated file, and
events whose first part was overwritten are skipped. It is an error if a file is not a ring or was
written by a newer version of holdfast.
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
    """A Guard's record that a step began, was committed or was skipped."""

    mark: StepMark
    # The number of optimizer steps committed so far.
    global_step: int
    # The largest number of samples in one forward/backward pass; 0 if unknown.
    micro_batch_size: int
    # The mean loss of the step, or None if it was not read. NaN means that the loss itself is NaN.
    loss: float | None
    # The global gradient norm before clipping, or None if it was not read.
    grad_norm: float | None
    # The duration of the step.
    seconds: float
    # When the record was written.
    unix_seconds: float
    # The number of the optimizer that stepped (see `Optimizers`); 0 if the script has only one.
    optimizer: int = 0


def read_steps(directory: Path) -> list[StepRecord]:
    """Return the step records that a Guard wrote to a directory, oldest first.

    Raises:
        RunDirectoryError: H305 if the file is not a ring or was written by a newer holdfast.
    """
    marks = [step_record_in(record) for record in read_ring(directory / STEPS_FILE)]
    return [mark for mark in marks if mark is not None]


def step_record_in(record: Record) -> StepRecord | None:
    """Decode a Guard's step record, or return None if it comes from another kind of ring."""
    if len(record.payload) != STEP.size:
        # This is a sample, or the ring's header is damaged.
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
    """Return a clause that says which steps of the recording in a directory have been lost.

    The clause is empty if every step is still in the ring or summarized in the history.
    """
    for name in (SAMPLES_FILE, STEPS_FILE):
        records = read_ring(directory / name)
        if records and records[0].sequence > 1:
            return _overwritten_steps(directory / name, oldest=records[0])
    return ""


def _overwritten_steps(path: Path, oldest: Record) -> str:
    """Return a clause about overwritten records that are not in the history, or ""."""
    # Imported here because importing numpy takes a tenth of a second.
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
    """Return the step in a sample or a Guard's step record, or 0 if the record is damaged."""
    sample = sample_of(record)
    if sample is not None:
        return sample.step
    mark = step_record_in(record)
    return 0 if mark is None else mark.global_step


def read_events(directory: Path) -> list[Event]:
    """Return the events recorded in a directory, oldest first.

    Raises:
        RunDirectoryError: H305 if the file is not a ring or was written by a newer holdfast.
    """
    parts = EventParts()
    events = [parts.add(record) for record in read_ring(directory / EVENTS_FILE)]
    return [event for event in events if event is not None]


class EventParts:
    """Reassembles events from their parts, skipping events with a lost or damaged part."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._previous_sequence = 0

    def add(self, record: Record) -> Event | None:
        """Add the next record, and return the event if this record is its last part, or else None.

        Args:
            record: A record of an event ring. Records must be added from oldest to newest.
        """
        if len(record.payload) < PART.size:
            return None
        index, count = PART.unpack_from(record.payload)
        is_next = len(self._parts) == index and record.sequence == self._previous_sequence + 1
        if index == 0 or not is_next:
            self._parts = []
        if index != 0 and not is_next:
            # An earlier part of this event was overwritten or is damaged.
            return None
        self._previous_sequence = record.sequence
        self._parts.append(record.payload[PART.size :])
        if len(self._parts) != count:
            return None
        return _decode(b"".join(self._parts))


def _decode(data: bytes) -> Event | None:
    """Return the event in its JSON encoding, or None if the encoding is damaged."""
    try:
        kind, global_step, unix_seconds, facts = json.loads(data.rstrip(b"\0"))
    except (ValueError, TypeError):
        return None
    if not (isinstance(facts, dict) and isinstance(kind, str)):
        return None
    return Event(kind=kind, global_step=global_step, unix_seconds=unix_seconds, data=facts)
