"""Define the raw record of one step, which the tracer writes, and convert it to a `Trace`.

The tracer assigns a number to each storage that it sees, and never reuses a number. A trace
contains only the storages of one step, numbered from 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from holdfast.forecast.trace.events import (
    OWNERS,
    PHASES,
    Assumption,
    Trace,
    allocation_of,
    free_of,
    is_allocation,
    storage_of,
)
from holdfast.forecast.trace.operations import Cost

FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PHASES))
_ACTIVATIONS = OWNERS.index("activations")
_UNOWNED = OWNERS.index("other")


class StorageTable:
    """Sizes, locations and owners of all storages that the tracer has seen, indexed by number."""

    def __init__(self) -> None:
        self.size_bytes: list[int] = []
        self.module: list[int] = []
        self.line: list[int] = []
        # The phase in which each storage was allocated, as an index into `PHASES`. Recomputation
        # counts as part of the forward pass.
        self.born: list[int] = []
        # The owner of each storage whose owner is known, as an index into `OWNERS`.
        self.owner: dict[int, int] = {}

    def add(self, size_bytes: int, module: int, line: int, born: int) -> int:
        """Add a storage and return its number."""
        self.size_bytes.append(size_bytes)
        self.module.append(module)
        self.line.append(line)
        self.born.append(born)
        return len(self.born) - 1

    def own(self, number: int, owner: str, module: int = 0) -> None:
        """Record an owner of a storage. If it has several owners, the first in `OWNERS` counts."""
        index = OWNERS.index(owner)
        if index <= self.owner.get(number, index):
            self.owner[number] = index
            self.module[number] = module or self.module[number]

    def total_bytes(self, numbers: Iterable[int]) -> int:
        """Return the total size of several storages."""
        return sum(self.size_bytes[number] for number in numbers)


class OperationRecord(NamedTuple):
    """An operation that ran in a step."""

    cost: Cost
    # The phase in which the operation ran, as an index into `PHASES`.
    phase: int
    # The number of events recorded before the operation.
    events_before: int


@dataclass(slots=True, kw_only=True)
class RawStep:
    """The raw record of a step. Storages are identified by their numbers in the `StorageTable`.

    Args:
        resident: Storages that are alive when the step begins.
        survivors: Storages that are alive when the step ends.
        events: The allocations and frees; see `Trace.events`.
        event_phase: The phase of each event, as an index into `PHASES`.
        operations: The operations that launched a kernel.
        backward_starts: The number of events before each point at which the computation of
            gradients begins, or resumes after a recomputation.
        optimizer_steps: See `Trace.optimizer_steps`.
        assumptions: Assumptions made while the step was recorded.
        uncalibrated_bytes: See `Trace.uncalibrated_bytes`.
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
        self.events.append(allocation_of(number))
        self.event_phase.append(phase)

    def free(self, number: int, phase: int) -> None:
        """Record that a storage is freed."""
        self.events.append(free_of(number))
        self.event_phase.append(phase)


def as_trace(step: RawStep, table: StorageTable, **fields: Any) -> Trace:
    """Convert the raw record of a step to a trace.

    Args:
        step: The raw record.
        table: The table with the sizes, locations and owners of the recorded storages.
        fields: The remaining fields of `Trace`, such as `modules` and `lines`.
    """
    allocated = [storage_of(event) for event in step.events if is_allocation(event)]
    # The numbers of the step's storages in the table. Their positions in this list become their
    # numbers in the trace.
    numbers = [*sorted(step.resident), *allocated]
    position = {number: position for position, number in enumerate(numbers)}
    events = []
    for event in step.events:
        storage = position[storage_of(event)]
        events.append(allocation_of(storage) if is_allocation(event) else free_of(storage))
    _sort_simultaneous_frees(events, step)
    left_behind = sorted(step.survivors - set(step.resident))
    freed_residents = sorted(set(step.resident) - step.survivors)
    costs = [operation.cost for operation in step.operations]
    fields["assumptions"] = (*fields.get("assumptions", ()), *step.assumptions)
    return Trace(
        events=np.array(events, dtype=np.int32),
        event_phase=np.array(step.event_phase, dtype=np.int8),
        size_bytes=np.array([table.size_bytes[number] for number in numbers], dtype=np.int64),
        owner=np.array(_owners(step, table, numbers), dtype=np.int8),
        module=np.array([table.module[number] for number in numbers], dtype=np.int32),
        line=np.array([table.line[number] for number in numbers], dtype=np.int32),
        operation_name=np.array([cost.name for cost in costs], dtype=np.int32),
        operation_event=np.array(
            [operation.events_before for operation in step.operations], dtype=np.int32
        ),
        operation_phase=np.array([operation.phase for operation in step.operations], dtype=np.int8),
        flops=np.array([cost.flops for cost in costs], dtype=np.int64),
        moved_bytes=np.array([cost.moved_bytes for cost in costs], dtype=np.int64),
        dtype=np.array([cost.dtype for cost in costs], dtype=np.int8),
        resident=tuple(range(len(step.resident))),
        carried=tuple(
            (position[left], position[freed])
            for left, freed in _match_by_size(left_behind, freed_residents, table)
        ),
        growth_bytes=table.total_bytes(left_behind) - table.total_bytes(freed_residents),
        optimizer_steps=tuple(step.optimizer_steps),
        uncalibrated_bytes=step.uncalibrated_bytes,
        **fields,
    )


def _sort_simultaneous_frees(events: list[int], step: RawStep) -> None:
    """Sort consecutive frees by storage number, in place, if nothing happens between them.

    Some storages are freed together, such as those in autocast's weight cache. They are freed in
    the iteration order of a hash table keyed by addresses, which differs from run to run. Sorting
    makes traces comparable.
    """
    boundaries = {operation.events_before for operation in step.operations}
    boundaries.update(step.backward_starts)
    for optimizer_step in step.optimizer_steps:
        boundaries.update(optimizer_step)
    phase = step.event_phase
    begin = 0
    for end in range(1, len(events) + 1):
        continues = (
            end < len(events)
            and end not in boundaries
            and not is_allocation(events[begin])
            and not is_allocation(events[end])
            and phase[end] == phase[begin]
        )
        if not continues:
            events[begin:end] = sorted(events[begin:end], key=storage_of)
            begin = end


def _match_by_size(
    left_behind: Iterable[int], freed: Iterable[int], table: StorageTable
) -> Iterator[tuple[int, int]]:
    """Yield pairs of a storage that a step leaves behind and a resident storage that it has freed.

    Only storages of the same size are paired, in the order in which they were allocated.
    """
    freed_by_size: dict[int, deque[int]] = defaultdict(deque)
    for number in freed:
        freed_by_size[table.size_bytes[number]].append(number)
    for number in left_behind:
        candidates = freed_by_size[table.size_bytes[number]]
        if candidates:
            yield number, candidates.popleft()


def _owners(step: RawStep, table: StorageTable, numbers: Sequence[int]) -> list[int]:
    """Return the owner of each storage, as an index into `OWNERS`."""
    activations = _activations(step, table)
    owners = []
    for number in numbers:
        owner = table.owner.get(number, _UNOWNED)
        if owner == _UNOWNED and number in activations:
            owner = _ACTIVATIONS
        owners.append(owner)
    return owners


def _activations(step: RawStep, table: StorageTable) -> set[int]:
    """Return the storages that count as activations.

    A forward pass allocates them, and they are still alive when the next backward pass begins.
    """
    allocated_at = {}
    freed_at = {}
    for position, event in enumerate(step.events):
        if is_allocation(event):
            allocated_at[storage_of(event)] = position
        else:
            freed_at[storage_of(event)] = position
    starts = step.backward_starts
    activations = set()
    for number, position in allocated_at.items():
        if table.born[number] not in (FORWARD, OTHER):
            continue
        # A backward start is the number of events before it, so a start that follows the allocation
        # is at least the allocation's position plus 1.
        next_start = bisect_left(starts, position + 1)
        if next_start == len(starts):
            continue
        if freed_at.get(number, len(step.events)) >= starts[next_start]:
            activations.add(number)
    return activations
