"""What a step needs if its batch is cut into micro-batches.

The recorded events are edited, nothing is traced again.

The second micro-batch runs while the gradients of the first are alive, and each of its own is added
to the first one's as soon as it is known. All later micro-batches are like the second, so two stand
for any number. What the first one leaves behind beside its gradients is dropped when the second
one's backward pass is done; the batch stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from holdfast.forecast.trace.events import OWNERS, PHASES, Trace
from holdfast.forecast.trace.extrapolation import most_each

_BACKWARD = PHASES.index("backward")
_GRADIENTS, _BATCH = OWNERS.index("gradients"), OWNERS.index("batch")
Ids = npt.NDArray[np.int64]


def with_accumulation(trace: Trace, global_batch_size: int) -> Trace:
    """Return the step that accumulates the gradients of several micro-batches, from a trace with
    one of them.

    The whole batch, in samples, lies on the device while it is worked on. It is a trace for memory:
        its operations
    are those of one micro-batch.
    """
    if global_batch_size <= trace.micro_batch_size or not (trace.event_phase == _BACKWARD).any():
        return trace
    return _Doubled(trace).made(global_batch_size)


class _Doubled:
    """A step, and what a micro-batch before it does."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._events = trace.events.astype(np.int64)
        self._storage = np.abs(self._events) - 1
        frees = np.flatnonzero(self._events < 0)
        self._dies = np.full(len(trace.size_bytes), len(self._events), dtype=np.int64)
        self._dies[self._storage[frees]] = frees
        # Of the last backward pass
        self._end = int(np.flatnonzero(trace.event_phase == _BACKWARD)[-1]) + 1
        # Which events the first pass has: of no optimizer's step
        self._in_first = np.ones(self._end, dtype=np.bool_)
        for begin, end in trace.optimizer_steps:
            self._in_first[begin:end] = False
        made = self._storage[: self._end][self._in_first & (self._events[: self._end] > 0)]
        is_gradient = (trace.owner[made] == _GRADIENTS) & (self._dies[made] >= self._end)
        self._gradients: Ids = made[is_gradient]
        self._others: Ids = made[~is_gradient]
        dies = self._dies[self._others]
        self._left: Ids = self._others[
            ~np.append(self._in_first, False)[np.minimum(dies, self._end)]
        ]

    def made(self, global_batch_size: int) -> Trace:
        """Return the trace of both."""
        trace, known = self._trace, len(self._trace.size_bytes)
        first = np.arange(known)  # the first pass takes new ids for all but the gradients
        first[self._others] = known + np.arange(len(self._others))
        # The second one's gradients
        own = known + len(self._others) + np.arange(len(self._gradients))
        sources = np.concatenate([np.arange(known), self._others, self._gradients])
        sizes = trace.size_bytes[sources]
        rest = global_batch_size - trace.micro_batch_size
        # A batch that the loss function moves itself is gone when its backward pass is done: the
        # rest is on the host.
        waits = known + np.flatnonzero(
            (trace.owner[self._others] == _BATCH) & np.isin(self._others, self._left)
        )
        # Python's integers know no bound
        whole = -(-sizes[waits].astype(object) * rest // trace.micro_batch_size)
        sizes[waits] = np.minimum(whole, most_each(len(sizes))).astype(np.int64)
        events = self._events[: self._end]
        before = (np.sign(events) * (first[self._storage[: self._end]] + 1))[self._in_first]
        events, at, inserted = self._second_pass(first, own)
        merged = np.insert(events, at, inserted)
        kept = merged != 0
        phases = np.insert(trace.event_phase, at, _BACKWARD)[kept]
        offset = len(before)
        spans = tuple(
            (begin + offset, end + offset) for begin, end in _moved_spans(trace, at, kept)
        )
        return replace(
            trace,
            events=np.concatenate([before, merged[kept]]).astype(np.int32),
            event_phase=np.concatenate([trace.event_phase[: self._end][self._in_first], phases]),
            size_bytes=sizes,
            owner=trace.owner[sources],
            module=trace.module[sources],
            line=trace.line[sources],
            operation_event=(trace.operation_event + offset).astype(np.int32),
            optimizer_steps=spans,
        )

    def _second_pass(self, first: Ids, own: Ids) -> tuple[Ids, Ids, Ids]:
        """Return the events of the step itself, which finds what the first pass left, and what
        to insert where.
        """
        events = self._events.copy()
        heirs = {found: made for made, found in self._trace.carried}
        left = dict.fromkeys(self._left.tolist())
        found = self._storage[: self._end] < len(self._trace.resident)
        for place in np.flatnonzero((events[: self._end] < 0) & found & self._in_first).tolist():
            # The first pass has freed what it found
            heir = heirs.get(int(self._storage[place]), -1)
            events[place] = -int(first[heir]) - 1 if heir in left else 0
            left.pop(heir, None)
        waiting = np.array(list(left), dtype=np.int64)
        is_batch = self._trace.owner[waiting] == _BATCH  # all of it is held until the step is done
        gone = np.where(is_batch, np.maximum(self._dies[waiting], self._end), self._end)
        births = np.flatnonzero(events > 0)
        born = births[np.isin(self._storage[births], self._gradients)]
        events[born] = own + 1
        at = np.concatenate([self._added(born), gone])
        return events, at, np.concatenate([-own - 1, -first[waiting] - 1])

    def _added(self, born: Ids) -> Ids:
        """Return the events before which gradients are added to the first ones.

        The next that makes no gradient.

        One node may make several, a weight's and a bias's, before any is added.
        """
        births = np.append(np.flatnonzero(self._events[: self._end] > 0), self._end)
        operation = np.searchsorted(self._trace.operation_event, births, side="right")
        makes = np.isin(operation, operation[np.isin(births, born)])
        others = births[~makes | (births == self._end)]
        added: Ids = others[np.searchsorted(others, born, side="right")]
        return added


def _moved_spans(trace: Trace, at: Ids, kept: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield where the optimizers' steps are now.

    What was inserted at their ends is no part of them.

    `at`, shape ``(inserted,)``, is the event before which each was inserted; `kept`, shape
    ``(events + inserted,)``, says which were not taken out afterwards.
    """
    remaining, ordered = np.concatenate([[0], np.cumsum(kept)]), np.sort(at)
    for begin, end in trace.optimizer_steps:
        first = begin + np.searchsorted(ordered, begin, side="right")
        last = end + np.searchsorted(ordered, end, side="left")
        yield int(remaining[first]), int(remaining[last])
