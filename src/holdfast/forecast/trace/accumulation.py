"""What a step needs if its batch is cut into micro-batches: the recorded events are edited, nothing is traced again.

The second micro-batch runs while the gradients of the first live, and each of its own gradients is added to the first
one's as soon as it is known. All later micro-batches are like the second, so two stand for any number. What the first
one leaves behind beside its gradients is let go when the second one's backward pass is done; the batch stays.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from holdfast.forecast.trace.events import OWNERS, PHASES, Trace
from holdfast.forecast.trace.extrapolation import most_each

_BACKWARD = PHASES.index("backward")
_GRADIENTS, _BATCH = OWNERS.index("gradients"), OWNERS.index("batch")
Ids = npt.NDArray[np.int64]


def with_accumulation(trace: Trace, global_batch_size: int) -> Trace:
    """Return the step that accumulates the gradients of several micro-batches.

    Args:
        trace: The step with one of them, with or without recomputation.
        global_batch_size: Samples of the whole batch, which lies on the device while it is worked on.

    Returns:
        A trace for its memory: its operations are those of one micro-batch. The trace itself if there is nothing to
        accumulate.
    """
    if global_batch_size <= trace.micro_batch_size or not (trace.event_phase == _BACKWARD).any():
        return trace
    return _Doubled(trace).made(global_batch_size)


class _Doubled:
    """A step, and what a micro-batch before it does.

    Args:
        trace: The step.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._events = trace.events.astype(np.int64)
        self._storage = np.abs(self._events) - 1
        frees = np.flatnonzero(self._events < 0)
        self._dies = np.full(len(trace.size_bytes), len(self._events), dtype=np.int64)
        self._dies[self._storage[frees]] = frees
        self._end = int(np.flatnonzero(trace.event_phase == _BACKWARD)[-1]) + 1  # of the last backward pass
        self._in_first = np.ones(self._end, dtype=np.bool_)  # which events the first pass has: of no optimizer's step
        for one in trace.variants:
            self._in_first[one.events[0] : one.events[1]] = False
        made = self._storage[: self._end][self._in_first & (self._events[: self._end] > 0)]
        is_gradient = (trace.owner[made] == _GRADIENTS) & (self._dies[made] >= self._end)
        self._gradients: Ids = made[is_gradient]
        self._others: Ids = made[~is_gradient]
        dies = self._dies[self._others]
        self._left: Ids = self._others[~np.append(self._in_first, False)[np.minimum(dies, self._end)]]

    def made(self, global_batch_size: int) -> Trace:
        """Return the trace of both."""
        trace, known = self._trace, len(self._trace.size_bytes)
        first = np.arange(known)  # the first pass takes new ids for all but the gradients
        first[self._others] = known + np.arange(len(self._others))
        own = known + len(self._others) + np.arange(len(self._gradients))  # the second one's gradients
        sources = np.concatenate([np.arange(known), self._others, self._gradients])
        sizes = trace.size_bytes[sources]
        rest = global_batch_size - trace.micro_batch_size
        # A batch that the loss function moves itself is gone when its backward pass is done: the rest is on the host.
        waits = known + np.flatnonzero((trace.owner[self._others] == _BATCH) & np.isin(self._others, self._left))
        whole = -(-sizes[waits].astype(object) * rest // trace.micro_batch_size)  # Python's integers know no bound
        sizes[waits] = np.minimum(whole, most_each(len(sizes))).astype(np.int64)
        before = self._first_pass(first)
        after = self._second_pass(first, own)
        return replace(
            trace,
            events=np.concatenate([before, after.events]).astype(np.int32),
            event_phase=np.concatenate([trace.event_phase[: self._end][self._in_first], after.phases]),
            size_bytes=sizes,
            owner=trace.owner[sources],
            module=trace.module[sources],
            line=trace.line[sources],
            operation_event=(trace.operation_event + len(before)).astype(np.int32),
            block_runs=(),
            variants=tuple(replace(one, events=after.moved(one.events, len(before))) for one in trace.variants),
        )

    def _first_pass(self, name: Ids) -> Ids:
        events = self._events[: self._end]
        renamed: Ids = np.sign(events) * (name[self._storage[: self._end]] + 1)
        kept: Ids = renamed[self._in_first]
        return kept

    def _second_pass(self, first: Ids, own: Ids) -> _Inserted:
        """Return the events of the step itself, which finds what the first pass left."""
        events = self._events.copy()
        heirs = {found: made for made, found in self._trace.carried}
        left = dict.fromkeys(self._left.tolist())
        found = self._storage[: self._end] < len(self._trace.resident)
        for place in np.flatnonzero((events[: self._end] < 0) & found & self._in_first).tolist():
            heir = heirs.get(int(self._storage[place]), -1)  # the first pass has freed what it found
            events[place] = -int(first[heir]) - 1 if heir in left else 0
            left.pop(heir, None)
        waiting = np.array(list(left), dtype=np.int64)
        is_batch = self._trace.owner[waiting] == _BATCH  # all of it is held until the step is done
        gone = np.where(is_batch, np.maximum(self._dies[waiting], self._end), self._end)
        births = np.flatnonzero(events > 0)
        born = births[np.isin(self._storage[births], self._gradients)]
        events[born] = own + 1
        at = np.concatenate([self._added(born), gone])
        return _Inserted(events, self._trace.event_phase, at, np.concatenate([-own - 1, -first[waiting] - 1]))

    def _added(self, born: Ids) -> Ids:
        """Return the events before which gradients are added to the first ones: the next that makes no gradient.

        One node may make several, a weight's and a bias's, before any is added.
        """
        births = np.append(np.flatnonzero(self._events[: self._end] > 0), self._end)
        operation = np.searchsorted(self._trace.operation_event, births, side="right")
        makes = np.isin(operation, operation[np.isin(births, born)])
        others = births[~makes | (births == self._end)]
        added: Ids = others[np.searchsorted(others, born, side="right")]
        return added


class _Inserted:
    """Events with others between them, and without those that are 0.

    Args:
        events: Shape ``(events,)``.
        phases: Shape ``(events,)``.
        at: Shape ``(inserted,)``: the event before which each is inserted.
        inserted: Shape ``(inserted,)``.
    """

    def __init__(self, events: Ids, phases: npt.NDArray[np.int8], at: Ids, inserted: Ids) -> None:
        merged = np.insert(events, at, inserted)
        kept = merged != 0
        self.events: Ids = merged[kept]
        self.phases = np.insert(phases, at, _BACKWARD)[kept]
        self._at: Ids = np.sort(at)
        self._places = np.concatenate([[0], np.cumsum(kept)])

    def moved(self, span: tuple[int, int], offset: int) -> tuple[int, int]:
        """Return where a range of events is now; what is inserted at its borders is not of it."""
        begin = span[0] + int(np.searchsorted(self._at, span[0], side="right"))
        end = span[1] + int(np.searchsorted(self._at, span[1], side="left"))
        return int(self._places[begin]) + offset, int(self._places[end]) + offset
