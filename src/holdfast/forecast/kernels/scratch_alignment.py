"""Give traces of one job the same scratch storages: kernels may take some from a certain size of the batch on only.

Scratch is what an operation allocates and frees at once. A trace in which an operation takes none, although it does
in another, gets some in proportion to its micro-batch, which is rather too much than too little.

Does not: align anything else (`extrapolation` refuses what differs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from holdfast.forecast.trace.events import OWNERS, Assumption, BlockRun, Trace

_SCRATCH = OWNERS.index("scratch")
Key = tuple[int, int]  # events before it that are not of scratch, and the operation that takes it
Ids = npt.NDArray[np.int64]


def with_same_scratch(traces: Sequence[Trace]) -> list[Trace]:
    """Return the traces with scratch at the same operations; as they are if nothing or more than that differs.

    Args:
        traces: Of one job, with different batches.
    """
    scratch = [_find_scratch(trace) for trace in traces]
    every = {key for found in scratch for key in found}
    if all(found.keys() == every for found in scratch):
        return list(traces)
    shapes = {(len(one.events) - 2 * len(found), len(one.flops)) for one, found in zip(traces, scratch, strict=True)}
    if len(shapes) > 1:
        return list(traces)
    return [
        _with_scratch(trace, found, {key: _size(key, trace, traces, scratch) for key in every - found.keys()})
        for trace, found in zip(traces, scratch, strict=True)
    ]


def _find_scratch(trace: Trace) -> dict[Key, int]:
    """Return the storages that an operation has taken and given back at once; of several the sum counts as one."""
    events = trace.events
    pairs = np.flatnonzero((events[:-1] > 0) & (events[1:] == -events[:-1]))
    pairs = pairs[trace.owner[events[pairs] - 1] == _SCRATCH]
    others = pairs - 2 * np.arange(len(pairs))
    maker = np.searchsorted(trace.operation_event, pairs, side="right") - 1
    keys = list(zip(others.tolist(), maker.tolist(), strict=True))
    found = dict(zip(keys, (events[pairs] - 1).tolist(), strict=True))
    return found if len(found) == len(keys) else {}  # more than one at an operation: nothing is touched


def _size(key: Key, trace: Trace, traces: Sequence[Trace], scratch: Sequence[dict[Key, int]]) -> int:
    """Return what a trace's scratch is by proportion, from one that has some, of the same length if possible."""
    having = [(one, found[key]) for one, found in zip(traces, scratch, strict=True) if key in found]
    donor, storage = min(having, key=lambda pair: pair[0].length != trace.length)
    return -(-int(donor.size_bytes[storage]) * trace.micro_batch_size // donor.micro_batch_size)


def _with_scratch(trace: Trace, found: dict[Key, int], missing: dict[Key, int]) -> Trace:
    if not missing:
        return trace
    keys = sorted(missing)
    known = sorted(found)
    # Behind as many other events, and behind the scratch of the operations before it.
    others = np.array([key[0] for key in keys])
    before = np.array([np.searchsorted([place for place, _ in known], key[0]) for key in keys])
    same = np.array([sum(place == key[0] and maker < key[1] for place, maker in known) for key in keys])
    at = np.repeat(others + 2 * (before + same), 2)
    storages = len(trace.size_bytes) + np.arange(len(keys))
    events = np.insert(trace.events.astype(np.int64), at, np.stack([storages + 1, -storages - 1], axis=1).ravel())
    phases = np.insert(trace.event_phase, at, np.repeat(trace.operation_phase[[maker for _, maker in keys]], 2))
    order = np.concatenate([np.array(trace.resident, dtype=np.int64), events[events > 0] - 1])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    none = np.zeros(len(keys), dtype=np.int64)
    shift = _Shift(np.array([maker for _, maker in keys]), rank, trace)
    what = (
        f"{len(keys)} operations take scratch with some batches only; it was taken to grow with the batch from 0 on"
    )
    return replace(
        trace,
        events=(np.sign(events) * (rank[np.abs(events) - 1] + 1)).astype(np.int32),
        event_phase=phases,
        size_bytes=np.concatenate([trace.size_bytes, [missing[key] for key in keys]])[order],
        owner=np.concatenate([trace.owner, none + _SCRATCH])[order].astype(np.int8),
        module=np.concatenate([trace.module, none])[order].astype(np.int32),
        line=np.concatenate([trace.line, none])[order].astype(np.int32),
        operation_event=shift.events(trace.operation_event, np.arange(len(trace.flops))).astype(np.int32),
        resident=shift.storages(trace.resident),
        carried=tuple((int(rank[left]), int(rank[taken])) for left, taken in trace.carried),
        block_runs=tuple(shift.block_run(run) for run in trace.block_runs),
        variants=tuple(replace(one, events=shift.span(one.events, one.operations)) for one in trace.variants),
        assumptions=(*trace.assumptions, Assumption(what=what)),
    )


class _Shift:
    """Where events and storages are when two events are added to each of some operations.

    Args:
        makers: The operations.
        rank: New number of each storage.
        trace: Before.
    """

    def __init__(self, makers: Ids, rank: Ids, trace: Trace) -> None:
        self._makers = np.sort(makers)
        self._rank = rank
        self._trace = trace

    def events(self, events: npt.NDArray[np.int32], operations: Ids) -> Ids:
        """Return events, each given with the operation that comes next."""
        return events + 2 * np.searchsorted(self._makers, operations, side="left")

    def span(self, events: tuple[int, int], operations: tuple[int, int]) -> tuple[int, int]:
        """Return a range of events, given with that of its operations."""
        begin, end = self.events(np.array(events, dtype=np.int32), np.array(operations)).tolist()
        return begin, end

    def storages(self, storages: tuple[int, ...]) -> tuple[int, ...]:
        """Return the new numbers of storages."""
        return tuple(self._rank[list(storages)].tolist())

    def block_run(self, run: BlockRun) -> BlockRun:
        """Return a pass."""
        following = np.searchsorted(self._trace.operation_event, run.backward)
        backward = run.backward + 2 * int(np.searchsorted(self._makers, following, side="left"))
        return replace(
            run,
            forward=self.span(run.forward, run.operations),
            backward=run.backward if run.backward < 0 else backward,
            kept=self.storages(run.kept),
            inputs=self.storages(run.inputs),
            saved=None if run.saved is None else self.storages(run.saved),
        )
