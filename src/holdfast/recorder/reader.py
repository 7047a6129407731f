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
from holdfast.recorder.ring import read_ring

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
    found = []
    for record in read_ring(directory / STEPS_FILE):
        mark, _, micro_batch_size, global_step, loss, norm, seconds = STEP.unpack(record.payload)
        if mark not in _MARKS:
            continue
        found.append(
            StepRecord(
                mark=StepMark(mark),
                global_step=global_step,
                micro_batch_size=micro_batch_size,
                loss=loss,
                grad_norm=norm,
                seconds=seconds,
                unix_seconds=record.nanoseconds / 1e9,
            )
        )
    return found


def read_events(directory: Path) -> list[Event]:
    """Return the recorded events, oldest first.

    Raises:
        RunDirectoryError: H305, as `read_ring`.
    """
    found: list[Event] = []
    parts: list[bytes] = []
    previous = 0
    for record in read_ring(directory / EVENTS_FILE):
        index, count = PART.unpack_from(record.payload)
        if index == 0:
            parts = []
        elif len(parts) != index or record.sequence != previous + 1:
            parts = []  # the beginning is gone: overwritten or torn
            continue
        previous = record.sequence
        parts.append(record.payload[PART.size :])
        if len(parts) == count:
            event = _decode(b"".join(parts))
            if event is not None:
                found.append(event)
    return found


def _decode(data: bytes) -> Event | None:
    try:
        kind, global_step, unix_seconds, facts = json.loads(data.rstrip(b"\0"))
    except (ValueError, TypeError):
        return None
    if not isinstance(facts, dict) or not isinstance(kind, str):
        return None
    return Event(kind=kind, global_step=global_step, unix_seconds=unix_seconds, data=facts)
