"""The raw record of one step, written by the tracer, and its conversion to a `Trace`.

The tracer gives storages numbers that are never reused while it exists. A trace numbers its own
storages from 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from holdfast.forecast.trace.events import OWNERS, PHASES, Assumption, Trace

FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PHASES))
_ACTIVATIONS = OWNERS.index("activations")
_UNOWNED = OWNERS.index("other")


class Ledger:
    """Facts about each storage, by its number."""

    def __init__(self) -> None:
        self.size_bytes: list[int] = []
        self.module: list[int] = []
        self.line: list[int] = []
        # The phase in which it was allocated. A recomputation counts as forward.
        self.born: list[int] = []
        self.owner: dict[int, int] = {}

    def add(self, size_bytes: int, module: int, line: int, born: int) -> int:
        """Add a storage and return its number."""
        self.size_bytes.append(size_bytes)
        self.module.append(module)
        self.line.append(line)
        self.born.append(born)
        return len(self.born) - 1

    def own(self, number: int, owner: str, module: int = 0) -> None:
        """Note who owns a storage. Of several owners, the first in `OWNERS` counts."""
        index = OWNERS.index(owner)
        if index <= self.owner.get(number, index):
            self.owner[number] = index
            self.module[number] = module or self.module[number]


class OperationRecord(NamedTuple):
    """An operation that ran: its values in the columns of `Trace` with the same names."""

    operation_name: int
    operation_event: int
    operation_phase: int
    flops: int
    moved_bytes: int
    dtype: int


# Types of the columns of operations in a trace, where they are not int32.
_COLUMN_TYPES = {
    "operation_phase": np.int8,
    "flops": np.int64,
    "moved_bytes": np.int64,
    "dtype": np.int8,
}


@dataclass(slots=True, kw_only=True)
class Recording:
    """The events of a step. Storages are identified by their numbers in the ledger.

    Args:
        resident: Storages that are alive when the step begins.
        survivors: Storages that are alive when it ends.
        events: As in `Trace.events`.
        event_phase: The phase of each event.
        operations: The operations that ran a kernel.
        backward_starts: For each backward pass, the number of events before it.
        optimizer_steps: As in `Trace.optimizer_steps`.
        assumptions: The assumptions.
        uncalibrated_bytes: As in `Trace.uncalibrated_bytes`.
    """

    resident: list[int]
    survivors: frozenset[int] = frozenset()
    events: list[int] = field(default_factory=list)
    event_phase: list[int] = field(default_factory=list)
    operations: list[OperationRecord] = field(default_factory=list)
    backward_starts: list[int] = field(default_factory=list)
    optimizer_steps: list[tuple[int, int]] = field(default_factory=list)
    assumptions: list[Assumption] = field(default_factory=list)
    uncalibrated_bytes: int = 0

    def allocate(self, number: int, phase: int) -> None:
        """Record that a storage is allocated."""
        self.events.append(number + 1)
        self.event_phase.append(phase)

    def free(self, number: int, phase: int) -> None:
        """Record that a storage is freed."""
        self.events.append(-number - 1)
        self.event_phase.append(phase)


def as_trace(recording: Recording, ledger: Ledger, **fields: Any) -> Trace:
    """Return the trace of a recorded step.

    Args:
        recording: The step.
        ledger: Facts about its storages.
        fields: The other fields of `Trace`, such as names of modules by number.
    """
    allocated = [event - 1 for event in recording.events if event > 0]
    numbers = [*sorted(recording.resident), *allocated]
    position = {number: position for position, number in enumerate(numbers)}
    fields["assumptions"] = (*fields.get("assumptions", ()), *recording.assumptions)
    return Trace(
        events=np.array(_renumbered_events(recording, position), dtype=np.int32),
        event_phase=np.array(recording.event_phase, dtype=np.int8),
        size_bytes=np.array([ledger.size_bytes[number] for number in numbers], dtype=np.int64),
        owner=np.array(_owners(recording, ledger, numbers), dtype=np.int8),
        module=np.array([ledger.module[number] for number in numbers], dtype=np.int32),
        line=np.array([ledger.line[number] for number in numbers], dtype=np.int32),
        **_operation_columns(recording.operations),
        resident=tuple(range(len(recording.resident))),
        carried=_carried(recording, ledger, position),
        growth_bytes=_growth_bytes(recording, ledger),
        optimizer_steps=tuple(recording.optimizer_steps),
        uncalibrated_bytes=recording.uncalibrated_bytes,
        **fields,
    )


def _renumbered_events(recording: Recording, position: dict[int, int]) -> list[int]:
    events = [
        position[event - 1] + 1 if event > 0 else -position[-event - 1] - 1
        for event in recording.events
    ]
    _sort_simultaneous_frees(events, recording)
    return events


def _sort_simultaneous_frees(events: list[int], recording: Recording) -> None:
    """Sort frees by storage if nothing happens between them.

    Storages freed at once, such as autocast's cache of weights, come in the order of a hash table
    of addresses, which differs from run to run without any effect.
    """
    boundaries = {operation.operation_event for operation in recording.operations}
    boundaries.update(recording.backward_starts)
    for step in recording.optimizer_steps:
        boundaries.update(step)
    phase = recording.event_phase
    begin = 0
    for end in range(1, len(events) + 1):
        continues = (
            end < len(events)
            and end not in boundaries
            and events[begin] < 0
            and events[end] < 0
            and phase[end] == phase[begin]
        )
        if not continues:
            events[begin:end] = sorted(events[begin:end], reverse=True)
            begin = end


def _operation_columns(operations: Sequence[OperationRecord]) -> dict[str, Any]:
    """Return the fields of `Trace` that describe operations."""
    return {
        name: np.array(
            [operation[column] for operation in operations],
            dtype=_COLUMN_TYPES.get(name, np.int32),
        )
        for column, name in enumerate(OperationRecord._fields)
    }


# --- what a step finds and leaves behind ----------------------------------------------------------


def _freed_residents(recording: Recording) -> list[int]:
    return sorted(set(recording.resident) - recording.survivors)


def _left_behind(recording: Recording) -> list[int]:
    return sorted(recording.survivors - set(recording.resident))


def _growth_bytes(recording: Recording, ledger: Ledger) -> int:
    """Return the bytes that the step leaves behind, minus the bytes that it found and freed."""
    left_bytes = sum(ledger.size_bytes[number] for number in _left_behind(recording))
    freed_bytes = sum(ledger.size_bytes[number] for number in _freed_residents(recording))
    return left_bytes - freed_bytes


def _carried(
    recording: Recording, ledger: Ledger, position: dict[int, int]
) -> tuple[tuple[int, int], ...]:
    """Pair the storages that the step leaves behind with those that it found and freed.

    Storages of the same size are paired, in the order in which they were allocated.
    """
    pairs = _match_by_size(
        _left_behind(recording), _freed_residents(recording), ledger.size_bytes.__getitem__
    )
    return tuple((position[left], position[freed]) for left, freed in pairs)


def _match_by_size(
    left: Sequence[int], freed: Iterable[int], size_of: Callable[[int], int]
) -> Iterator[tuple[int, int]]:
    freed_by_size: dict[int, deque[int]] = {}
    for number in freed:
        freed_by_size.setdefault(size_of(number), deque()).append(number)
    for number in left:
        candidates = freed_by_size.get(size_of(number))
        if candidates:
            yield number, candidates.popleft()


# --- owners ---------------------------------------------------------------------------------------


def _owners(recording: Recording, ledger: Ledger, numbers: Sequence[int]) -> list[int]:
    """Return the owner of each storage, as an index into `OWNERS`."""
    activations = _activations(recording, ledger)
    owners = []
    for number in numbers:
        owner = ledger.owner.get(number, _UNOWNED)
        if owner == _UNOWNED and number in activations:
            owner = _ACTIVATIONS
        owners.append(owner)
    return owners


def _activations(recording: Recording, ledger: Ledger) -> set[int]:
    """Return the storages of a forward pass that live until a backward pass begins."""
    allocated_at = {}
    freed_at = {}
    for position, event in enumerate(recording.events):
        if event > 0:
            allocated_at[event - 1] = position
        else:
            freed_at[-event - 1] = position
    starts = recording.backward_starts
    activations = set()
    for number, position in allocated_at.items():
        if ledger.born[number] not in (FORWARD, OTHER):
            continue
        next_start = bisect_left(starts, position + 1)
        if next_start == len(starts):
            continue
        if freed_at.get(number, len(recording.events)) >= starts[next_start]:
            activations.add(number)
    return activations
