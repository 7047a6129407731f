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

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from holdfast.forecast.trace.events import OWNERS, PHASES, Trace
from holdfast.forecast.trace.extrapolation import most_each

_BACKWARD = PHASES.index("backward")
_GRADIENTS = OWNERS.index("gradients")
_BATCH = OWNERS.index("batch")
# Marks an event of the step that does not happen in the second pass.
_NO_EVENT = 0

# Numbers of storages, or positions among events.
Indices = npt.NDArray[np.int64]


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
    return _TwoPasses(trace).build(global_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Insertion:
    """Events to insert into those of the step.

    Args:
        positions: The position of the step's event before which each event is inserted.
        events: The events, as in `Trace.events`.
    """

    positions: Indices
    events: Indices


class _TwoPasses:
    """A step, and the pass of an earlier micro-batch before it.

    The gradients of the first pass keep the numbers of the step's storages; everything else that it
    allocates gets new ones. In the second pass it is the reverse.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._events = trace.events.astype(np.int64)
        self._storage = np.abs(self._events) - 1
        self._freed_at = self._positions_of_frees()
        # The position after the last backward pass, where the first pass ends.
        self._end = int(np.flatnonzero(trace.event_phase == _BACKWARD)[-1]) + 1
        # The events up to there that belong to the first pass: all except those of optimizer steps,
        # which hooks may perform during backward.
        self._in_first = np.ones(self._end, dtype=np.bool_)
        for begin, end in trace.optimizer_steps:
            self._in_first[begin:end] = False

        allocates = self._in_first & (self._events[: self._end] > 0)
        allocated = self._storage[: self._end][allocates]
        is_gradient = (trace.owner[allocated] == _GRADIENTS) & (
            self._freed_at[allocated] >= self._end
        )
        self._gradients: Indices = allocated[is_gradient]
        self._others: Indices = allocated[~is_gradient]
        # Storages other than gradients that the first pass allocates and does not free.
        freed_in_first = np.append(self._in_first, False)
        freed_at = np.minimum(self._freed_at[self._others], self._end)
        self._left: Indices = self._others[~freed_in_first[freed_at]]

        step_storages = len(trace.size_bytes)
        # The numbers of the step's storages in the first pass.
        self._first_numbers = np.arange(step_storages)
        self._first_numbers[self._others] = step_storages + np.arange(len(self._others))
        # The numbers of the second pass's gradients.
        first_gradient = step_storages + len(self._others)
        self._second_gradients = first_gradient + np.arange(len(self._gradients))

    def build(self, global_batch_size: int) -> Trace:
        """Return the trace of both passes."""
        trace = self._trace
        events = self._events[: self._end]
        renamed = np.sign(events) * (self._first_numbers[self._storage[: self._end]] + 1)
        first_events = renamed[self._in_first]
        first_phases = trace.event_phase[: self._end][self._in_first]

        # The second pass is the step itself, with three changes where the first pass matters.
        events = self._events.copy()
        left = self._free_replacements(events)
        additions = self._add_gradients(events)
        releases = self._release(left)
        positions = np.concatenate([additions.positions, releases.positions])
        inserted = np.concatenate([additions.events, releases.events])
        with_inserted = np.insert(events, positions, inserted)
        happens = with_inserted != _NO_EVENT
        second_events = with_inserted[happens]
        second_phases = np.insert(trace.event_phase, positions, _BACKWARD)[happens]

        offset = len(first_events)
        optimizer_steps = tuple(
            (begin + offset, end + offset) for begin, end in _moved_spans(trace, positions, happens)
        )
        # For each storage of both passes, the storage of the step that it copies.
        sources = np.concatenate([np.arange(len(trace.size_bytes)), self._others, self._gradients])
        return replace(
            trace,
            events=np.concatenate([first_events, second_events]).astype(np.int32),
            event_phase=np.concatenate([first_phases, second_phases]),
            size_bytes=self._sizes(sources, global_batch_size),
            owner=trace.owner[sources],
            module=trace.module[sources],
            line=trace.line[sources],
            operation_event=(trace.operation_event + offset).astype(np.int32),
            optimizer_steps=optimizer_steps,
        )

    def _positions_of_frees(self) -> Indices:
        """Return the position at which each storage is freed, or the number of events if never."""
        positions = np.full(len(self._trace.size_bytes), len(self._events), dtype=np.int64)
        frees = np.flatnonzero(self._events < 0)
        positions[self._storage[frees]] = frees
        return positions

    def _sizes(self, sources: Indices, global_batch_size: int) -> npt.NDArray[np.int64]:
        """Return the sizes of all storages.

        The batch of the first pass represents those of all micro-batches but one, because the whole
        batch is on the device. A batch that the loss function moves there itself is freed with its
        backward pass, and keeps its size.
        """
        trace = self._trace
        sizes = trace.size_bytes[sources]
        other_samples = global_batch_size - trace.micro_batch_size
        is_batch = (trace.owner[self._others] == _BATCH) & np.isin(self._others, self._left)
        batch = len(trace.size_bytes) + np.flatnonzero(is_batch)
        # Computed with Python's integers, which cannot overflow.
        batch_bytes = -(-sizes[batch].astype(object) * other_samples // trace.micro_batch_size)
        sizes[batch] = np.minimum(batch_bytes, most_each(len(sizes))).astype(np.int64)
        return sizes

    def _free_replacements(self, events: Indices) -> Indices:
        """Make the second pass free the replacements that the first pass left.

        The storages that the step originally finds and frees were already freed by the first pass.

        Args:
            events: The events of the step, which are edited.

        Returns:
            The storages that the first pass left behind and the second pass still does not free.
        """
        replacements = {old: new for new, old in self._trace.carried}
        left = dict.fromkeys(self._left.tolist())
        is_resident = self._storage[: self._end] < len(self._trace.resident)
        frees_resident = (events[: self._end] < 0) & is_resident & self._in_first
        for position in np.flatnonzero(frees_resident).tolist():
            replacement = replacements.get(int(self._storage[position]), -1)
            if replacement in left:
                events[position] = -int(self._first_numbers[replacement]) - 1
                del left[replacement]
            else:
                events[position] = _NO_EVENT
        return np.array(list(left), dtype=np.int64)

    def _release(self, left: Indices) -> _Insertion:
        """Return the frees of the storages that the first pass left behind.

        The batch is held until the step no longer needs it, the rest only until the second backward
        pass ends.
        """
        is_batch = self._trace.owner[left] == _BATCH
        batch_until = np.maximum(self._freed_at[left], self._end)
        return _Insertion(
            positions=np.where(is_batch, batch_until, self._end),
            events=-self._first_numbers[left] - 1,
        )

    def _add_gradients(self, events: Indices) -> _Insertion:
        """Give the gradients of the second pass their own storages, and return the frees of these.

        Args:
            events: The events of the step, which are edited.
        """
        allocations = np.flatnonzero(events > 0)
        computed = allocations[np.isin(self._storage[allocations], self._gradients)]
        events[computed] = self._second_gradients + 1
        return _Insertion(
            positions=self._positions_of_addition(computed),
            events=-self._second_gradients - 1,
        )

    def _positions_of_addition(self, computed: Indices) -> Indices:
        """Return the positions before which gradients are added to those of the first pass.

        That is before the next allocation of an operation that computes no gradient. One operation
        may compute several, for a weight and a bias, before any of them is added.

        Args:
            computed: Positions at which the gradients are allocated.
        """
        allocations = np.append(np.flatnonzero(self._events[: self._end] > 0), self._end)
        operation = np.searchsorted(self._trace.operation_event, allocations, side="right")
        computes_gradient = np.isin(operation, operation[np.isin(allocations, computed)])
        candidates = allocations[~computes_gradient | (allocations == self._end)]
        positions: Indices = candidates[np.searchsorted(candidates, computed, side="right")]
        return positions


def _moved_spans(
    trace: Trace, positions: Indices, happens: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each optimizer step after the editing.

    Events inserted at either end of an optimizer step do not belong to it.

    Args:
        trace: The trace before the editing.
        positions: Shape ``(inserted,)``: the event before which each event was inserted.
        happens: Shape ``(events + inserted,)``: False for those removed afterwards.
    """
    remaining = np.concatenate([[0], np.cumsum(happens)])
    ordered = np.sort(positions)
    for begin, end in trace.optimizer_steps:
        first = begin + np.searchsorted(ordered, begin, side="right")
        last = end + np.searchsorted(ordered, end, side="left")
        yield int(remaining[first]), int(remaining[last])
