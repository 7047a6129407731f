"""Compute the memory of a step whose batch is split into micro-batches with accumulated gradients.

The events of a trace with one micro-batch are edited; nothing is traced again. The edited step has
two passes:

- The first pass is the step up to the end of its backward pass, without the optimizers.
  Its gradients stay.
- The second pass is the step itself. Each of its gradients is added to that of the first pass as
  soon as it is computed, and then freed. Everything else that the first pass left behind is freed
  when the second backward pass is done. The optimizers step at the end.

All later micro-batches are like the second one, so two passes represent any number of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace

import numpy as np

from holdfast.forecast.trace.events import OWNERS, PHASES, Trace
from holdfast.forecast.trace.extrapolation import largest_size

_BACKWARD = PHASES.index("backward")
_GRADIENTS = OWNERS.index("gradients")
_BATCH = OWNERS.index("batch")


def with_accumulation(trace: Trace, global_batch_size: int) -> Trace:
    """Return the step that accumulates the gradients of several micro-batches.

    The whole batch is assumed to be on the device during the step. The result is valid for memory
    only: its operations are those of one micro-batch.

    Args:
        trace: A step with one micro-batch. It is returned unchanged if that is the whole batch, or
            if the step has no backward pass.
        global_batch_size: Samples per optimizer step.
    """
    has_backward = bool((trace.event_phase == _BACKWARD).any())
    if global_batch_size <= trace.micro_batch_size or not has_backward:
        return trace
    first = _FirstPass(trace)
    second = _SecondPass(trace, first)
    # For each storage of both passes, the storage of the step that it copies.
    sources = [*range(len(trace.size_bytes)), *first.others, *first.gradients]
    sizes = trace.size_bytes[sources]
    for storage in first.left:
        if trace.owner[storage] == _BATCH:
            sizes[first.number[storage]] = _bytes_of_other_micro_batches(
                trace, storage, global_batch_size, most=largest_size(len(sizes))
            )
    offset = len(first.events)
    return replace(
        trace,
        events=np.array(first.events + second.events, dtype=np.int32),
        event_phase=np.array(first.phases + second.phases, dtype=np.int8),
        size_bytes=sizes,
        owner=trace.owner[sources],
        module=trace.module[sources],
        line=trace.line[sources],
        operation_event=(trace.operation_event + offset).astype(np.int32),
        optimizer_steps=tuple(
            (begin + offset, end + offset) for begin, end in second.optimizer_steps
        ),
    )


def _allocation_of(storage: int) -> int:
    """Return the event that allocates a storage, as in `Trace.events`."""
    return storage + 1


def _free_of(storage: int) -> int:
    """Return the event that frees a storage, as in `Trace.events`."""
    return -(storage + 1)


def _bytes_of_other_micro_batches(
    trace: Trace, storage: int, global_batch_size: int, *, most: int
) -> int:
    """Return the size of a batch tensor in the first pass, which stands for all other passes.

    The whole batch is on the device, so it is the size of all other micro-batches. A batch that
    the loss function itself moves to the device is freed in the backward pass, so it is not one of
    these tensors.
    """
    size_bytes = int(trace.size_bytes[storage])
    other_samples = global_batch_size - trace.micro_batch_size
    return min(most, -(-size_bytes * other_samples // trace.micro_batch_size))


class _FirstPass:
    """The pass of an earlier micro-batch: forward and backward without the optimizers.

    It is a copy of the first part of the step. A storage that the step allocates exists twice then,
    once for each pass, and needs two numbers. In this pass, gradients keep the number that they
    have in the step, because they stay until the optimizers step. All others get a new number.

    Attributes:
        end: The position after the last backward event of the step, where this pass ends.
        positions: The positions of its events in the step.
        gradients: Storages of the step with the gradients that the pass computes and keeps.
        others: All other storages of the step that the pass allocates.
        left: Those of `others` that the pass does not free.
        number: The new number of each storage in `others`.
        events: As in `Trace.events`.
        phases: The phase of each event.
    """

    def __init__(self, trace: Trace) -> None:
        events = trace.events.tolist()
        phases = trace.event_phase.tolist()
        self.end = int(np.flatnonzero(trace.event_phase == _BACKWARD)[-1]) + 1
        in_optimizer: set[int] = set()
        for begin, end in trace.optimizer_steps:
            in_optimizer.update(range(begin, end))
        # Hooks may step optimizers during the backward pass.
        self.positions = [position for position in range(self.end) if position not in in_optimizer]
        allocated = [events[position] - 1 for position in self.positions if events[position] > 0]
        freed = {-events[position] - 1 for position in self.positions if events[position] < 0}
        freed_until_end = {-event - 1 for event in events[: self.end] if event < 0}
        self.gradients = [
            storage
            for storage in allocated
            if trace.owner[storage] == _GRADIENTS and storage not in freed_until_end
        ]
        kept = set(self.gradients)
        self.others = [storage for storage in allocated if storage not in kept]
        self.left = [storage for storage in self.others if storage not in freed]
        first_number = len(trace.size_bytes)
        self.number = {
            storage: number for number, storage in enumerate(self.others, start=first_number)
        }
        self.events = [self._renamed(events[position]) for position in self.positions]
        self.phases = [phases[position] for position in self.positions]

    def _renamed(self, event: int) -> int:
        storage = abs(event) - 1
        number = self.number.get(storage, storage)
        if event < 0:
            return _free_of(number)
        return _allocation_of(number)


class _SecondPass:
    """The pass of the last micro-batch: the step itself, edited where the first pass matters.

    Here it is the gradients that get new numbers; everything else keeps the number that it has in
    the step.

    Attributes:
        events: As in `Trace.events`.
        phases: The phase of each event.
        optimizer_steps: As in `Trace.optimizer_steps`.
    """

    def __init__(self, trace: Trace, first: _FirstPass) -> None:
        self._trace = trace
        self._first = first
        # The events of the step, with None where it no longer has one.
        self._edited: list[int | None] = trace.events.tolist()
        # Frees to insert, by the position in the step before which they happen.
        self._inserted: dict[int, list[int]] = defaultdict(list)
        left = self._free_replacements()
        self._add_gradients()
        self._release(left)
        self._assemble()

    def _free_replacements(self) -> list[int]:
        """Free the replacements that the first pass left, as the next step would.

        The storages that the step originally finds and frees were already freed by the first pass.

        Returns:
            The storages that the first pass left behind and this pass still does not free.
        """
        replacement_of = {found: left for left, found in self._trace.carried}
        left = dict.fromkeys(self._first.left)
        resident_count = len(self._trace.resident)
        for position in self._first.positions:
            event = int(self._trace.events[position])
            storage = -event - 1
            if event > 0 or storage >= resident_count:
                continue
            self._edited[position] = None
            replacement = replacement_of.get(storage)
            if replacement in left:
                self._edited[position] = _free_of(self._first.number[replacement])
                del left[replacement]
        return list(left)

    def _add_gradients(self) -> None:
        """Give each gradient of this pass a storage of its own, and free it once it is added.

        One operation may compute several gradients, for example of a weight and a bias, before any
        of them is added. So a gradient counts as added at the next allocation by an operation that
        computes no gradient.
        """
        events = self._trace.events.tolist()
        gradients = set(self._first.gradients)
        operation_events = self._trace.operation_event.tolist()
        # The operation of each allocation until the backward pass ends, by the allocation's
        # position.
        operation_at = {
            position: bisect_right(operation_events, position)
            for position in range(self._first.end)
            if events[position] > 0
        }
        gradient_positions = [
            position for position in operation_at if events[position] - 1 in gradients
        ]
        gradient_operations = {operation_at[position] for position in gradient_positions}
        # Where all gradients that were computed before are freed, in ascending order.
        free_positions = [
            position
            for position, operation in operation_at.items()
            if operation not in gradient_operations
        ]
        free_positions.append(self._first.end)
        # The new numbers follow those of the first pass.
        number = len(self._trace.size_bytes) + len(self._first.others)
        for position in gradient_positions:
            self._edited[position] = _allocation_of(number)
            free_position = free_positions[bisect_right(free_positions, position)]
            self._inserted[free_position].append(_free_of(number))
            number += 1

    def _release(self, left: list[int]) -> None:
        """Free what the first pass left behind.

        The batch is held until the step no longer needs it, the rest only until this backward pass
        ends.
        """
        event_count = len(self._trace.events)
        freed_at = {
            -event - 1: position
            for position, event in enumerate(self._trace.events.tolist())
            if event < 0
        }
        for storage in left:
            position = self._first.end
            if self._trace.owner[storage] == _BATCH:
                position = max(position, freed_at.get(storage, event_count))
            self._inserted[position].append(_free_of(self._first.number[storage]))

    def _assemble(self) -> None:
        """Put the edited and the inserted events together."""
        self.events: list[int] = []
        self.phases: list[int] = []
        # For each position in the step, the number of events before and after those inserted there,
        # which belong to no optimizer step.
        before_inserted = []
        after_inserted = []
        phases = self._trace.event_phase.tolist()
        for position in range(len(phases) + 1):
            before_inserted.append(len(self.events))
            inserted = self._inserted.get(position, [])
            self.events += inserted
            self.phases += [_BACKWARD] * len(inserted)
            after_inserted.append(len(self.events))
            if position == len(phases):
                break
            event = self._edited[position]
            if event is not None:
                self.events.append(event)
                self.phases.append(phases[position])
        self.optimizer_steps = tuple(
            (after_inserted[begin], before_inserted[end])
            for begin, end in self._trace.optimizer_steps
        )
