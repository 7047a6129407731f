"""From traces of two small batches to a trace at any micro-batch size, without running anything
again.

A storage grows by a fixed number of bytes for each sample, so two traces say its size at any
micro-batch. The *peak*
is the largest of many such sums and no line itself: a line through two peaks errs on the low side
    (up to -52 % was
measured, on a loop decoder), so every storage is extrapolated and the events are played again.

A list of samples, a loop over them or a branch on their number cannot be extrapolated: such a step
    is another program
at each size, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import BatchError
from holdfast.forecast.trace.events import OWNERS, Assumption, Trace

# One sample goes other ways (a dimension of 1 is contiguous either way): 3 of the 7 models that
# were tried did.
LEAST_MICRO_BATCH_SIZE = 2
FITTED_SIZES = (LEAST_MICRO_BATCH_SIZE, 2 * LEAST_MICRO_BATCH_SIZE)
_SCRATCH = OWNERS.index("scratch")
_OF_ANY_SIZE = [OWNERS.index(owner) for owner in ("parameters", "gradients", "optimizer state")]
_COMPARED = ("blocks", "resident", "carried", "optimizer_steps", "precision", "route")


class NotAlignedError(BatchError):
    """Two traces of one step do not do the same things in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledTrace:
    """A step at any micro-batch size, by that of two that were traced.

    Args:
        template: The first trace; everything but sizes and work is the same in both.
        size_bytes: Shape ``(2, storages)``; `flops` and `moved_bytes` are ``(2, operations)``.
        totals: Shape ``(2, 2)``: the growth of the step and what is not calibrated, in bytes.
        accumulates: Whether a global batch is cut into micro-batches whose gradients are added up,
            as a guard does.
    """

    template: Trace
    micro_batch_sizes: tuple[int, int]
    size_bytes: npt.NDArray[np.int64]
    flops: npt.NDArray[np.int64]
    moved_bytes: npt.NDArray[np.int64]
    totals: npt.NDArray[np.int64]
    accumulates: bool = False

    def at(self, micro_batch_size: int) -> Trace:
        """Return the step with this many samples, at least 1.

        Sizes are exact where they grow by whole bytes; others are rounded up, and said to be.
        """
        assert micro_batch_size >= 1
        sizes = self._line(self.size_bytes, micro_batch_size)
        growth, uncalibrated = self._line(self.totals, micro_batch_size).tolist()
        return replace(
            self.template,
            size_bytes=sizes,
            flops=self._line(self.flops, micro_batch_size),
            moved_bytes=self._line(self.moved_bytes, micro_batch_size),
            growth_bytes=growth,
            uncalibrated_bytes=max(uncalibrated, int(self.totals[:, 1].min())),
            micro_batch_size=micro_batch_size,
            assumptions=self.template.assumptions + self._assumptions(micro_batch_size, sizes),
        )

    def _line(self, values: npt.NDArray[np.int64], at: int) -> npt.NDArray[np.int64]:
        """Return the values on the lines through two rows, in whole numbers, rounded up, from 0
        to `most_each`.
        """
        low, high = self.micro_batch_sizes
        largest = int(np.abs(values).max(initial=1))
        fits = largest * (high + low + 2 * at) < 1 << 62
        rows = values if fits else values.astype(object)  # Python's integers know no bound
        total = (high - at) * rows[0] + (at - low) * rows[1]
        bounded = np.clip(-(-total // (high - low)), 0, most_each(values.shape[1]))
        result: npt.NDArray[np.int64] = bounded.astype(np.int64)
        return result

    def _assumptions(
        self, micro_batch_size: int, sizes: npt.NDArray[np.int64]
    ) -> tuple[Assumption, ...]:
        said = []
        low, high = self.micro_batch_sizes
        if micro_batch_size < LEAST_MICRO_BATCH_SIZE:
            said.append(
                f"{micro_batch_size} sample is extrapolated from {low} and {high}, and may go"
                " another way"
            )
        uneven = (self.size_bytes[1] - self.size_bytes[0]) % (high - low) != 0
        if uneven.any():
            share = 100 * int(sizes[uneven].sum()) / max(1, int(sizes.sum()))
            said.append(
                f"{int(uneven.sum())} storages ({share:.1f} % of all bytes) do not grow by whole"
                " bytes per sample; they were rounded up"
            )
        return tuple(Assumption(what=what) for what in said)


def fit(traces: Sequence[Trace]) -> ScaledTrace:
    """Return the step at any size, from traces of one job at two micro-batch sizes of at least 2.

    NotAlignedError if they do not do the same; it names the first difference.
    """
    first, second = sorted(traces, key=lambda trace: trace.micro_batch_size)
    assert LEAST_MICRO_BATCH_SIZE <= first.micro_batch_size < second.micro_batch_size
    difference = _find_difference(first, second)
    if difference is not None:
        raise NotAlignedError(
            f"the step does other things with {_described(second)} than with {_described(first)}:"
            f" {difference}",
            limit=(
                "sizes can be extrapolated only if every batch goes the same way through the model"
            ),
            fix=(
                "remove the branch on the batch, or what is kept from step to step; let the loader"
                " collate a list of samples into one tensor, since each size of a list is another"
                " program"
            ),
            rule="H425",
        )
    both = (first, second)
    assumptions = dict.fromkeys(said for one in both for said in one.assumptions)
    return ScaledTrace(
        template=replace(first, assumptions=tuple(assumptions)),
        micro_batch_sizes=(first.micro_batch_size, second.micro_batch_size),
        size_bytes=_with_even_scratch(both),
        flops=np.stack([one.flops for one in both]),
        moved_bytes=np.stack([one.moved_bytes for one in both]),
        totals=np.array(
            [[one.growth_bytes, one.uncalibrated_bytes] for one in both], dtype=np.int64
        ),
    )


def _with_even_scratch(traces: Sequence[Trace]) -> npt.NDArray[np.int64]:
    """Return the sizes of storages, shape ``(2, storages)``, with scratch in proportion where a
    trace has none.

    Kernels may take scratch from a certain size of the batch on only: proportion is rather too much
        than too little.
    """
    sizes = np.stack([one.size_bytes for one in traces])
    samples = np.array([[one.micro_batch_size] for one in traces])
    missing = (sizes == 0) & (traces[0].owner == _SCRATCH)
    return np.where(missing, (-(-sizes // samples)).max(axis=0) * samples, sizes)


def most_each(count: int) -> int:
    """Return the most that each of some sizes is taken to be, far above any device.

    Their sum is a 64-bit integer.
    """
    return (1 << 60) // max(1, count)


def _described(trace: Trace) -> str:
    return f"{trace.micro_batch_size} samples"


def _find_difference(first: Trace, other: Trace) -> str | None:
    names = {name: number for number, name in enumerate(first.names)}
    translated = np.array([names.get(name, -1) for name in other.names], dtype=np.int32)
    operation = _first_unequal(first.operation_name, translated[other.operation_name])
    event = _first_unequal(first.events, other.events)
    if event is not None:
        at = max(0, int(np.searchsorted(first.operation_event, event, side="right")) - 1)
        operation = at if operation is None else min(operation, at)
    elif operation is None:
        operation = _first_unequal(first.operation_event, other.operation_event)
    if operation is not None:
        return (
            f"operation {operation} is {_operation(first, operation)}, there"
            f" {_operation(other, operation)}"
        )
    if _found(first) != _found(other):
        return "the parameters and states that live before it differ"
    changed = next(
        (name for name in _COMPARED if getattr(first, name) != getattr(other, name)), None
    )
    return None if changed is None else f"their {changed.replace('_', ' ')} differ"


def _found(trace: Trace) -> list[tuple[int, int, int]]:
    """Return owner, module and size of what is alive before the step, as far as no batch changes
    it.
    """
    found = np.array(trace.resident, dtype=np.int64)
    found = found[np.isin(trace.owner[found], _OF_ANY_SIZE)]
    columns = (trace.owner, trace.module, trace.size_bytes)
    return list(zip(*(column[found].tolist() for column in columns), strict=True))


def _first_unequal(one: npt.NDArray[np.int32], two: npt.NDArray[np.int32]) -> int | None:
    shared = min(len(one), len(two))
    unequal = np.flatnonzero(one[:shared] != two[:shared])
    if len(unequal):
        return int(unequal[0])
    return None if len(one) == len(two) else shared


def _operation(trace: Trace, number: int) -> str:
    """Return an operation's name, and the line of the user's that is nearest before it."""
    if number >= len(trace.operation_name):
        return "missing"
    last = number + 1 == len(trace.operation_event)
    born = trace.events[: len(trace.events) if last else trace.operation_event[number + 1]]
    lines = trace.line[born[born > 0] - 1]
    known = lines[lines > 0]
    where = f" at {trace.lines[known[-1]]}" if len(known) else ""
    return f"{trace.names[trace.operation_name[number]]}{where}"
