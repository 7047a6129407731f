"""Compute the memory of a step that accumulates the gradients of several micro-batches.

The computation edits the events of a trace with one micro-batch, so no further tracing is needed.
The edited step has two passes, each over one micro-batch:

- The first pass is the original step up to the end of its backward pass, without the optimizers.
  Its gradients stay alive.
- The second pass is the whole original step. Each of its gradients is added to the corresponding
  gradient of the first pass as soon as it is computed, and is then freed. All other memory that the
  first pass leaves behind is freed when the second backward pass ends. The optimizers step at the
  end.

Further micro-batches would need the same memory as the second one, so two passes are enough.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace

import numpy as np

from holdfast.forecast.trace.events import (
    OWNERS,
    PHASES,
    Trace,
    allocation_of,
    free_of,
    is_allocation,
    storage_of,
)
from holdfast.forecast.trace.extrapolation import largest_size

_BACKWARD = PHASES.index("backward")
_GRADIENTS = OWNERS.index("gradients")
_BATCH = OWNERS.index("batch")


def with_accumulation(trace: Trace, global_batch_size: int) -> Trace:
    """Return the trace of a step that accumulates the gradients of several micro-batches.

    The whole batch is assumed to be on the device during the step. Use the result only to compute
    memory: its list of operations still covers only one micro-batch.

    Args:
        trace: A step with one micro-batch. It is returned unchanged if the micro-batch is the whole
            batch, or if the step has no backward pass.
        global_batch_size: The number of samples per optimizer step.
    """
    has_backward = bool((trace.event_phase == _BACKWARD).any())
    if global_batch_size <= trace.micro_batch_size or not has_backward:
        return trace
    first = _FirstPass(trace)
    second = _SecondPass(trace, first)
    # For each storage in the result, the original storage from which its size, owner, module and
    # line are copied. The original storages come first, followed by the additional storages of the
    # first pass and the additional gradients of the second pass.
    sources = [*range(len(trace.size_bytes)), *first.others, *first.gradients]
    sizes = trace.size_bytes[sources]
    for storage in first.left_behind:
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


def _bytes_of_other_micro_batches(
    trace: Trace, storage: int, global_batch_size: int, *, most: int
) -> int:
    """Return the size of a batch tensor that the first pass leaves behind.

    Because the whole batch is on the device, this tensor represents all micro-batches but the last.
    (A micro-batch that the loss function itself moves to the device is freed by the end of the
    backward pass, so the first pass does not leave it behind.)

    Args:
        trace: The original step.
        storage: The number of the batch tensor's storage in the original step.
        global_batch_size: The number of samples per optimizer step.
        most: An upper limit for the result, in bytes.
    """
    size_bytes = int(trace.size_bytes[storage])
    other_samples = global_batch_size - trace.micro_batch_size
    return min(most, -(-size_bytes * other_samples // trace.micro_batch_size))


class _FirstPass:
    """The first pass: forward and backward over an earlier micro-batch, without the optimizers.

    The events are copied from the original step. Each storage that both passes allocate exists
    twice in the result, so one of the two needs a new number. Gradients of the first pass keep
    their original numbers, because they live until the optimizers step. All other storages of the
    first pass get new numbers.

    Args:
        trace: The original step.

    Attributes:
        end: The position in the original step at which this pass ends, which is right after the
            last event of the backward pass.
        positions: The positions of the copied events in the original step.
        gradients: The original numbers of the gradients that the pass allocates and does not free.
        others: The original numbers of all other storages that the pass allocates.
        left_behind: The storages in `others` that the pass does not free.
        number: The new number of each storage in `others`.
        events: The events of this pass, as in `Trace.events`.
        phases: The phase of each event.
    """

    def __init__(self, trace: Trace) -> None:
        events = trace.events.tolist()
        phases = trace.event_phase.tolist()
        self.end = int(np.flatnonzero(trace.event_phase == _BACKWARD)[-1]) + 1
        in_optimizer: set[int] = set()
        for begin, end in trace.optimizer_steps:
            in_optimizer.update(range(begin, end))
        # Optimizer events are left out here as well, because hooks may step optimizers during the
        # backward pass.
        self.positions = [position for position in range(self.end) if position not in in_optimizer]
        copied = [events[position] for position in self.positions]
        allocated = [storage_of(event) for event in copied if is_allocation(event)]
        freed = {storage_of(event) for event in copied if not is_allocation(event)}
        # Unlike `freed`, this set includes storages that an optimizer frees during the backward
        # pass.
        freed_until_end = {
            storage_of(event) for event in events[: self.end] if not is_allocation(event)
        }
        self.gradients = [
            storage
            for storage in allocated
            if trace.owner[storage] == _GRADIENTS and storage not in freed_until_end
        ]
        gradients = set(self.gradients)
        self.others = [storage for storage in allocated if storage not in gradients]
        self.left_behind = [storage for storage in self.others if storage not in freed]
        first_number = len(trace.size_bytes)
        self.number = {
            storage: number for number, storage in enumerate(self.others, start=first_number)
        }
        self.events = [self._renumber(event) for event in copied]
        self.phases = [phases[position] for position in self.positions]

    def _renumber(self, event: int) -> int:
        """Return an event of the original step with its storage renumbered for the first pass."""
        storage = storage_of(event)
        number = self.number.get(storage, storage)
        if is_allocation(event):
            return allocation_of(number)
        return free_of(number)


class _SecondPass:
    """The second pass: the original step over the last micro-batch, after the first pass.

    In this pass, gradients get new numbers. All other storages keep their original numbers.

    Args:
        trace: The original step.
        first: The first pass.

    Attributes:
        events: The events of this pass, as in `Trace.events`.
        phases: The phase of each event.
        optimizer_steps: The positions of the optimizer steps in `events`, in the format of
            `Trace.optimizer_steps`.
    """

    def __init__(self, trace: Trace, first: _FirstPass) -> None:
        self._trace = trace
        self._first = first
        # The events, indexed by their position in the original step. None marks a removed event.
        self._edited: list[int | None] = trace.events.tolist()
        # The frees to insert before each position in the original step.
        self._inserted: dict[int, list[int]] = defaultdict(list)
        left_behind = self._free_replacements()
        self._add_gradients()
        self._free_at_end(left_behind)
        self._assemble()

    def _free_replacements(self) -> list[int]:
        """Free the replacements that the first pass allocated for resident storages.

        The original step frees some resident storages and leaves replacements behind (see
        `Trace.carried`). In the result, the first pass has already freed these resident storages.
        Where the original step frees a resident storage, this pass therefore frees its replacement,
        as the next step would.

        Returns:
            The storages that the first pass leaves behind and that this method did not free.
        """
        replacement_of = {resident: new for new, resident in self._trace.carried}
        left_behind = dict.fromkeys(self._first.left_behind)
        resident_count = len(self._trace.resident)
        for position in self._first.positions:
            event = int(self._trace.events[position])
            storage = storage_of(event)
            if is_allocation(event) or storage >= resident_count:
                continue
            self._edited[position] = None
            replacement = replacement_of.get(storage)
            if replacement in left_behind:
                self._edited[position] = free_of(self._first.number[replacement])
                del left_behind[replacement]
        return list(left_behind)

    def _add_gradients(self) -> None:
        """Give each gradient of this pass its own storage, and free it once it has been added.

        One operation may compute several gradients, such as those of a weight and a bias, before
        any of them is added. A gradient is assumed to be added, and then freed, just before the
        next allocation by an operation that computes no gradient.
        """
        events = self._trace.events.tolist()
        gradients = set(self._first.gradients)
        operation_events = self._trace.operation_event.tolist()
        # For each allocation before the end of the backward pass, the operation that makes it,
        # keyed by the allocation's position.
        operation_at = {
            position: bisect_right(operation_events, position)
            for position in range(self._first.end)
            if is_allocation(events[position])
        }
        gradient_positions = [
            position for position in operation_at if storage_of(events[position]) in gradients
        ]
        gradient_operations = {operation_at[position] for position in gradient_positions}
        # The positions, in ascending order, right before which all pending gradients are freed.
        free_positions = [
            position
            for position, operation in operation_at.items()
            if operation not in gradient_operations
        ]
        free_positions.append(self._first.end)
        # The new numbers follow those of the first pass.
        number = len(self._trace.size_bytes) + len(self._first.others)
        for position in gradient_positions:
            self._edited[position] = allocation_of(number)
            # The gradient is freed at the first of these positions after its allocation.
            free_position = free_positions[bisect_right(free_positions, position)]
            self._inserted[free_position].append(free_of(number))
            number += 1

    def _free_at_end(self, left_behind: list[int]) -> None:
        """Free the storages that the first pass left behind.

        Batch tensors are freed where the original step frees them, but not before the end of the
        backward pass. All other storages are freed when the backward pass ends.
        """
        event_count = len(self._trace.events)
        freed_at = {
            storage_of(event): position
            for position, event in enumerate(self._trace.events.tolist())
            if not is_allocation(event)
        }
        for storage in left_behind:
            position = self._first.end
            if self._trace.owner[storage] == _BATCH:
                position = max(position, freed_at.get(storage, event_count))
            self._inserted[position].append(free_of(self._first.number[storage]))

    def _assemble(self) -> None:
        """Build `events`, `phases` and `optimizer_steps` from the edited and inserted events."""
        self.events: list[int] = []
        self.phases: list[int] = []
        # For each position in the original step, the number of assembled events before and after
        # the frees inserted there. Inserted frees are not part of any optimizer step.
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
