"""Read what a process recorded, also after it was killed in the middle of a write.

Tolerant: torn slots, a wrapped ring, a cut file and events whose first part is overwritten are
passed over. A file that is no ring, or one of a newer version, is an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.events.event import Event
from holdfast.recorder.black_box import (
    EVENTS_FILE,
    LOSS_IS_READ,
    NORM_IS_READ,
    PART,
    STEP,
    STEPS_FILE,
    StepMark,
)
from holdfast.recorder.progress import sample_of
from holdfast.recorder.ring import Record, read_ring, value_or_none
from holdfast.recorder.run_files import SAMPLES_FILE

_MARKS = frozenset(StepMark)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One mark of a step as it lies in the ring."""

    mark: StepMark
    global_step: int  # optimizer steps committed so far
    micro_batch_size: int  # most samples in one forward/backward, 0 if unknown
    loss: float | None  # mean of the step; None if it was not read: NaN is a loss that is NaN
    grad_norm: float | None  # global, before clipping; None if it was not read
    seconds: float  # duration of the step
    unix_seconds: float  # when the mark was written
    optimizer: int = 0  # number of those that stepped, see `Optimizers`; 0 if there is one


def read_steps(directory: Path) -> list[StepRecord]:
    """Return the recorded marks of steps, oldest first; H305 as `read_ring`."""
    return [mark for mark in map(mark_of, read_ring(directory / STEPS_FILE)) if mark is not None]


def mark_of(record: Record) -> StepRecord | None:
    """Return what a record of the ring of steps says, None if it is of another kind."""
    if len(record.payload) != STEP.size:
        return None  # of a damaged header
    mark, is_read, micro_batch_size, global_step, loss, norm, seconds = STEP.unpack(record.payload)
    if mark not in _MARKS:
        return None
    return StepRecord(
        mark=StepMark(mark),
        global_step=global_step,
        micro_batch_size=micro_batch_size,
        loss=value_or_none(loss, is_read & LOSS_IS_READ),
        grad_norm=value_or_none(norm, is_read & NORM_IS_READ),
        seconds=seconds,
        unix_seconds=record.nanoseconds / 1e9,
        optimizer=is_read >> 8,
    )


def not_recorded_any_more(directory: Path) -> str:
    """Return which steps of a process are kept nowhere any more, as words.

    An empty text if all are, or in short.
    """
    for name in (SAMPLES_FILE, STEPS_FILE):
        records = read_ring(directory / name)
        if records and records[0].sequence > 1:
            # Here: numpy takes a tenth of a second
            from holdfast.recorder.history import read_history

            _, newest, gone = read_history(directory / name)
            gone += max(records[0].sequence - 1 - newest, 0)
            sample, mark = sample_of(records[0]), mark_of(records[0])
            step = (
                sample.step if sample is not None else mark.global_step if mark is not None else 0
            )
            what = f"the steps before step {step:,} are not recorded any more"
            return f"{what}: {gone:,} older records were overwritten" if gone else ""
    return ""


def read_events(directory: Path) -> list[Event]:
    """Return the recorded events, oldest first; H305 as `read_ring`."""
    parts = EventParts()
    return [
        event
        for record in read_ring(directory / EVENTS_FILE)
        if (event := parts.add(record)) is not None
    ]


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
    sound = isinstance(facts, dict) and isinstance(kind, str)
    return (
        Event(kind=kind, global_step=global_step, unix_seconds=unix_seconds, data=facts)
        if sound
        else None
    )
