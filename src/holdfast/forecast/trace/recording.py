"""The raw record of one step, as the tracer writes it, and how it becomes a `Trace`.

Storages have numbers that are never used again while a tracer is there; a trace numbers its own
from 0.
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
_ACTIVATIONS, _REST = OWNERS.index("activations"), OWNERS.index("other")


class Ledger:
    """What is known of each storage, by its number."""

    def __init__(self) -> None:
        self.size_bytes: list[int] = []
        self.module: list[int] = []
        self.line: list[int] = []
        self.born: list[int] = []  # phase; a recomputation counts as forward
        self.owner: dict[int, int] = {}

    def add(self, size_bytes: int, module: int, line: int, born: int) -> int:
        """Return the number of a new storage."""
        self.size_bytes.append(size_bytes)
        self.module.append(module)
        self.line.append(line)
        self.born.append(born)
        return len(self.born) - 1

    def own(self, number: int, owner: str, module: int = 0) -> None:
        """Note who owns a storage; of several, the one that comes first in `OWNERS`."""
        index = OWNERS.index(owner)
        if index <= self.owner.get(number, index):
            self.owner[number] = index
            self.module[number] = module or self.module[number]


class Ran(NamedTuple):
    """An operation that ran.

    The columns of `Trace`, and the events before it, and so before what it allocated.
    """

    operation_name: int
    operation_event: int
    operation_phase: int
    flops: int
    moved_bytes: int
    dtype: int


_TYPES = {"operation_phase": np.int8, "flops": np.int64, "moved_bytes": np.int64, "dtype": np.int8}


@dataclass(slots=True, kw_only=True)
class Recording:
    """What happens in a step; storages by their numbers in the ledger.

    `resident` is alive when it begins, `survivors` when it ends; autograd's engine begins before
    `backward_starts`.
    """

    resident: list[int]
    survivors: frozenset[int] = frozenset()
    events: list[int] = field(default_factory=list)
    event_phase: list[int] = field(default_factory=list)
    operations: list[Ran] = field(default_factory=list)
    backward_starts: list[int] = field(default_factory=list)
    optimizer_steps: list[tuple[int, int]] = field(default_factory=list)
    assumptions: list[Assumption] = field(default_factory=list)
    uncalibrated_bytes: int = 0

    def allocate(self, number: int, phase: int) -> None:
        """Note that a storage begins."""
        self.events.append(number + 1)
        self.event_phase.append(phase)

    def free(self, number: int, phase: int) -> None:
        """Note that a storage ends."""
        self.events.append(-number - 1)
        self.event_phase.append(phase)


def _match_in_order(
    left: Sequence[int], found: Iterable[int], size_of: Callable[[int], int]
) -> Iterator[tuple[int, int]]:
    """Yield which of what was left takes the place of which that was found, by size and order."""
    places: dict[int, deque[int]] = {}
    for number in found:
        places.setdefault(size_of(number), deque()).append(number)
    for number in left:
        if candidates := places.get(size_of(number)):
            yield number, candidates.popleft()


def as_trace(recording: Recording, ledger: Ledger, **described: Any) -> Trace:
    """Return the trace of a recorded step.

    `described` are the other fields of `Trace`, such as names by number.
    """
    numbers = [*sorted(recording.resident), *(event - 1 for event in recording.events if event > 0)]
    dense = {number: place for place, number in enumerate(numbers)}
    carried, growth = _carried(recording, ledger, dense)
    events = [
        dense[event - 1] + 1 if event > 0 else -dense[-event - 1] - 1 for event in recording.events
    ]
    _sort_frees(events, recording)
    columns = (
        zip(*recording.operations, strict=True) if recording.operations else [()] * len(Ran._fields)
    )
    operations: dict[str, Any] = {
        name: np.array(column, dtype=_TYPES.get(name, np.int32))
        for name, column in zip(Ran._fields, columns, strict=True)
    }
    described["assumptions"] = (*described.get("assumptions", ()), *recording.assumptions)
    return Trace(
        events=np.array(events, dtype=np.int32),
        event_phase=np.array(recording.event_phase, dtype=np.int8),
        size_bytes=np.array([ledger.size_bytes[number] for number in numbers], dtype=np.int64),
        owner=np.array(_owners(recording, ledger, numbers), dtype=np.int8),
        module=np.array([ledger.module[number] for number in numbers], dtype=np.int32),
        line=np.array([ledger.line[number] for number in numbers], dtype=np.int32),
        **operations,
        resident=tuple(range(len(recording.resident))),
        carried=carried,
        growth_bytes=growth,
        optimizer_steps=tuple(recording.optimizer_steps),
        uncalibrated_bytes=recording.uncalibrated_bytes,
        **described,
    )


def _sort_frees(events: list[int], recording: Recording) -> None:
    """Bring frees that nothing parts into the order of their storages.

    What is freed at once, as autocast's cache of weights, comes in the order of a hash table of
    addresses: another in each run, to no effect.
    """
    parts = {*(ran.operation_event for ran in recording.operations), *recording.backward_starts}
    parts |= {place for step in recording.optimizer_steps for place in step}
    phase = recording.event_phase
    begin = 0
    for end in range(1, len(events) + 1):
        together = (
            end < len(events)
            and events[begin] < 0
            and events[end] < 0
            and phase[end] == phase[begin]
        )
        if not together or end in parts:
            events[begin:end] = sorted(events[begin:end], reverse=True)
            begin = end


def _carried(
    recording: Recording, ledger: Ledger, dense: dict[int, int]
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Pair what the step leaves with what it found and freed, both in the order in which they
    were allocated.
    """
    resident = set(recording.resident)
    freed = sorted(resident - recording.survivors)
    left = sorted(recording.survivors - resident)
    size_of = ledger.size_bytes.__getitem__
    growth = sum(map(size_of, left)) - sum(map(size_of, freed))
    return (
        tuple((dense[made], dense[found]) for made, found in _match_in_order(left, freed, size_of)),
        growth,
    )


def _owners(recording: Recording, ledger: Ledger, numbers: Sequence[int]) -> list[int]:
    """Return the owner of each storage.

    Activations are what waits for a backward pass that has not begun.
    """
    birth = {event - 1: place for place, event in enumerate(recording.events) if event > 0}
    death = {-event - 1: place for place, event in enumerate(recording.events) if event < 0}
    starts = recording.backward_starts
    owners = []
    for number in numbers:
        owner = ledger.owner.get(number, _REST)
        if owner == _REST and number in birth and ledger.born[number] in (FORWARD, OTHER):
            start = bisect_left(starts, birth[number] + 1)
            if start < len(starts) and death.get(number, len(recording.events)) >= starts[start]:
                owner = _ACTIVATIONS
        owners.append(owner)
    return owners
