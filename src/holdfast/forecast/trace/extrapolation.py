"""Compute the trace at any micro-batch size from traces at two small sizes.

The same is done for a parameter of the user's factory, such as a sequence length, from traces at
three values; see `extrapolate_parameter`.

Each storage grows by a fixed number of bytes per sample, so its size at any micro-batch size
follows from two traces. The *peak* does not grow linearly, because the storages that are alive at
the peak differ between sizes. A straight line through two peaks underestimates the peak, by up to
52 % for a decoder that loops over time steps. Therefore, each storage is extrapolated on its own,
and the events are then replayed with the new sizes.

A step that loops over a list of samples, or branches on their number, runs different operations at
each size. Such a step cannot be extrapolated and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import BatchError
from holdfast.forecast.trace.events import OWNERS, Assumption, Trace, is_allocation, storage_of

# A batch with a single sample is never traced, because it may take other code paths: tensors with a
# dimension of size 1 can be contiguous in several layouts. This happened in 3 of 7 tested models.
LEAST_MICRO_BATCH_SIZE = 2
FITTED_SIZES = (LEAST_MICRO_BATCH_SIZE, 2 * LEAST_MICRO_BATCH_SIZE)

_SCRATCH = OWNERS.index("scratch")
# Owners whose sizes do not depend on the batch.
_BATCH_INDEPENDENT = [
    OWNERS.index(owner) for owner in ("parameters", "gradients", "optimizer state")
]
# Fields of `Trace` that must be the same at both sizes.
_COMPARED_FIELDS = ("blocks", "resident", "carried", "optimizer_steps", "precision", "route")
# The sum of all storage sizes is kept below this limit, so that it fits in a 64-bit integer. No
# device has nearly this much memory.
_MOST_TOTAL_BYTES = 1 << 60
# Products of a size and a number of samples are computed with 64-bit integers only if they are
# below this limit.
_MOST_PRODUCT = 1 << 62


class NotAlignedError(BatchError):
    """Traces of a step at two batch sizes differ in more than the sizes of storages (H425)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledTrace:
    """A step that can be scaled to any size, made from traces at two or three sizes.

    A size is the micro-batch size in samples or, if `parameter` is set, the value of a parameter of
    the user's factory. In each array, the rows come from the traces, in the order of `sizes`.

    Args:
        template: The trace at the smallest size. The other traces differ from it only in the values
            of the arguments below.
        sizes: The traced sizes in ascending order. Figures are extrapolated linearly from two
            sizes, and as quadratic functions from three.
        size_bytes: Shape ``(sizes, storages)``; see `Trace.size_bytes`.
        flops: Shape ``(sizes, operations)``; see `Trace.flops`.
        moved_bytes: Shape ``(sizes, operations)``; see `Trace.moved_bytes`.
        growth_bytes: Shape ``(sizes, 1)``; see `Trace.growth_bytes`.
        uncalibrated_bytes: Shape ``(sizes, 1)``; see `Trace.uncalibrated_bytes`.
        accumulates: Whether a larger batch can be split into micro-batches whose gradients are
            accumulated, as `Guard` does.
        parameter: The name of the factory's parameter, or an empty string if a size is a
            micro-batch size.
    """

    template: Trace
    sizes: tuple[int, ...]
    size_bytes: npt.NDArray[np.int64]
    flops: npt.NDArray[np.int64]
    moved_bytes: npt.NDArray[np.int64]
    growth_bytes: npt.NDArray[np.int64]
    uncalibrated_bytes: npt.NDArray[np.int64]
    accumulates: bool = False
    parameter: str = ""

    def at(self, size: int) -> Trace:
        """Return the trace at any size of at least 1.

        The size of a storage is exact if it grows by a whole number of bytes per sample. All other
        sizes are rounded up, and the rounding is reported as an assumption.
        """
        assert size >= 1
        storage_sizes = self._extrapolate(self.size_bytes, size)
        growth_bytes = self._extrapolate(self.growth_bytes, size)
        uncalibrated_bytes = self._extrapolate(self.uncalibrated_bytes, size)
        micro_batch_size = size
        if self.parameter:
            micro_batch_size = self.template.micro_batch_size
        return replace(
            self.template,
            size_bytes=storage_sizes,
            flops=self._extrapolate(self.flops, size),
            moved_bytes=self._extrapolate(self.moved_bytes, size),
            growth_bytes=int(growth_bytes[0]),
            uncalibrated_bytes=int(max(uncalibrated_bytes[0], self.uncalibrated_bytes.min())),
            micro_batch_size=micro_batch_size,
            assumptions=self.template.assumptions + self._assumptions(size, storage_sizes),
        )

    def _extrapolate(self, values: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
        """Extrapolate each column from the traced sizes to another size.

        The results are rounded up to integers and limited to the range from 0 to `largest_size`.
        """
        result = _interpolate(values, self.sizes, size)
        if len(self.sizes) > 2 and size > self.sizes[-1]:
            # A column that grows less and less is one that is rounded or reaches a limit. A
            # quadratic function through it would fall again, so continue it as a straight line.
            result = np.maximum(result, _interpolate(values[-2:], self.sizes[-2:], size))
        limited: npt.NDArray[np.int64] = np.clip(result, 0, largest_size(values.shape[1])).astype(
            np.int64
        )
        return limited

    def _assumptions(
        self, size: int, storage_sizes: npt.NDArray[np.int64]
    ) -> tuple[Assumption, ...]:
        if self.parameter:
            values = ", ".join(map(str, self.sizes))
            what = (
                f"the step with {self.parameter}={size} was extrapolated from steps with"
                f" {self.parameter}={values}; each tensor was assumed to grow linearly or with the"
                " square of this number"
            )
            return (Assumption(what=what),)
        assumptions = []
        low, high = self.sizes
        if size < LEAST_MICRO_BATCH_SIZE:
            what = (
                f"a step of {size} sample was extrapolated from steps of {low} and"
                f" {high} samples; in reality, it may take another path through the model"
            )
            assumptions.append(Assumption(what=what))
        is_uneven = (self.size_bytes[1] - self.size_bytes[0]) % (high - low) != 0
        if is_uneven.any():
            percent = 100 * int(storage_sizes[is_uneven].sum()) / max(1, int(storage_sizes.sum()))
            what = (
                f"{int(is_uneven.sum())} storages ({percent:.1f} % of all bytes) do not grow by a"
                " whole number of bytes per sample, so their sizes were rounded up"
            )
            assumptions.append(Assumption(what=what))
        return tuple(assumptions)


def extrapolate(traces: Sequence[Trace]) -> ScaledTrace:
    """Combine traces of a job at two micro-batch sizes, each at least `LEAST_MICRO_BATCH_SIZE`.

    Raises:
        NotAlignedError: If the traces differ in more than the sizes of storages. The error
            describes the first difference.
    """
    first, second = sorted(traces, key=lambda trace: trace.micro_batch_size)
    assert LEAST_MICRO_BATCH_SIZE <= first.micro_batch_size < second.micro_batch_size
    difference = _find_difference(first, second)
    if difference is not None:
        raise NotAlignedError(
            f"the step behaves differently with {second.micro_batch_size} samples than with"
            f" {first.micro_batch_size} samples: {difference}",
            limit=(
                "memory can be extrapolated only if the step runs the same operations at every"
                " batch size"
            ),
            fix=(
                "remove branches that depend on the batch, and state kept between steps. If the"
                " batch is a list of samples, let the data loader collate it into one tensor."
            ),
            rule="H425",
        )
    return _scaled_trace((first, second), (first.micro_batch_size, second.micro_batch_size))


def extrapolate_parameter(parameter: str, traces: Mapping[int, Trace]) -> ScaledTrace:
    """Combine traces of a job at three values of a parameter of its factory.

    Each storage is assumed to be at most a quadratic function of the parameter. For a sequence
    length, this includes the scores of an attention that is computed without a fused kernel.

    Args:
        parameter: The name of the parameter.
        traces: The traces, keyed by the value of the parameter.

    Raises:
        NotAlignedError: If the traces differ in more than the sizes of storages.
    """
    values = tuple(sorted(traces))
    first = traces[values[0]]
    for value in values[1:]:
        # Parameters may grow as well, such as an embedding of positions.
        difference = _find_difference(first, traces[value], compares_resident=False)
        if difference is not None:
            raise NotAlignedError(
                f"the step behaves differently with {parameter}={value} than with"
                f" {parameter}={values[0]}: {difference}",
                limit=(
                    "memory can be extrapolated only if the step runs the same operations with"
                    " every value"
                ),
                fix=(
                    f"choose a parameter that changes only the sizes of tensors, or traced values"
                    f" that are closer to those of your runs, with --vary {parameter}=STEP."
                ),
                rule="H425",
            )
    return replace(_scaled_trace([traces[value] for value in values], values), parameter=parameter)


def _scaled_trace(traces: Sequence[Trace], sizes: tuple[int, ...]) -> ScaledTrace:
    """Combine traces that differ only in the sizes of storages.

    Args:
        traces: The traces, in ascending order of their size.
        sizes: The size of each trace.
    """
    assumptions = dict.fromkeys(assumption for trace in traces for assumption in trace.assumptions)
    return ScaledTrace(
        template=replace(traces[0], assumptions=tuple(assumptions)),
        sizes=sizes,
        size_bytes=_with_even_scratch(traces, sizes),
        flops=np.stack([trace.flops for trace in traces]),
        moved_bytes=np.stack([trace.moved_bytes for trace in traces]),
        growth_bytes=np.array([[trace.growth_bytes] for trace in traces], dtype=np.int64),
        uncalibrated_bytes=np.array(
            [[trace.uncalibrated_bytes] for trace in traces], dtype=np.int64
        ),
    )


def _interpolate(
    values: npt.NDArray[np.int64], sizes: Sequence[int], size: int
) -> npt.NDArray[Any]:
    """Return the value at `size` of the polynomial through each column, rounded up.

    Args:
        values: Shape ``(sizes, columns)``.
        sizes: The sizes at which the values are known.
        size: The size at which the values are wanted.
    """
    # The weights of Lagrange's formula.
    weights = [
        math.prod(
            (Fraction(size - other, known - other) for other in sizes if other != known),
            start=Fraction(1),
        )
        for known in sizes
    ]
    denominator = math.lcm(*(weight.denominator for weight in weights))
    numerators = [int(weight * denominator) for weight in weights]
    largest = int(np.abs(values).max(initial=1))
    if largest * sum(map(abs, numerators)) >= _MOST_PRODUCT:
        # Use Python's integers, which cannot overflow.
        values = values.astype(object)
    weighted = sum(weight * row for weight, row in zip(numerators, values, strict=True))
    rounded_up: npt.NDArray[Any] = -(-weighted // denominator)
    return rounded_up


def largest_size(count: int) -> int:
    """Return the largest size that `count` storages can all have without overflowing int64."""
    return _MOST_TOTAL_BYTES // max(1, count)


def _with_even_scratch(traces: Sequence[Trace], sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the storage sizes in all traces, with missing scratch memory filled in.

    Some kernels use scratch memory only above a certain batch size. If a kernel uses none in one
    trace, this function assumes the same number of bytes per sample as in the other traces, so that
    the forecast is too high rather than too low.

    Returns:
        Shape ``(traces, storages)``.
    """
    size_bytes = np.stack([trace.size_bytes for trace in traces])
    samples = np.array(sizes)[:, np.newaxis]
    is_missing = (size_bytes == 0) & (traces[0].owner == _SCRATCH)
    bytes_per_sample = (-(-size_bytes // samples)).max(axis=0)
    return np.where(is_missing, bytes_per_sample * samples, size_bytes)


# --- comparing two traces -------------------------------------------------------------------------


def _find_difference(first: Trace, other: Trace, *, compares_resident: bool = True) -> str | None:
    """Describe the first difference between two traces, apart from sizes.

    Args:
        first: One trace.
        other: The other trace.
        compares_resident: Whether parameters, gradients and optimizer states must have the same
            sizes in both traces.

    Returns:
        The description, or None if the traces differ only in sizes.
    """
    operation = _first_different_operation(first, other)
    if operation is not None:
        return (
            f"operation {operation} is {_describe_operation(other, operation)} instead of"
            f" {_describe_operation(first, operation)}"
        )
    if compares_resident and _resident_sizes(first) != _resident_sizes(other):
        return "the parameters, gradients or optimizer states before the step differ"
    for field in _COMPARED_FIELDS:
        if getattr(first, field) != getattr(other, field):
            return f"the {field.replace('_', ' ')} of the traces differ"
    return None


def _first_different_operation(first: Trace, other: Trace) -> int | None:
    """Return the position of the first operation whose name or events differ between two traces.

    Returns:
        None if all operations are the same.
    """
    numbers = {name: number for number, name in enumerate(first.names)}
    in_first = np.array([numbers.get(name, -1) for name in other.names], dtype=np.int32)
    by_name = _first_unequal(first.operation_name, in_first[other.operation_name])
    event = _first_unequal(first.events, other.events)
    if event is not None:
        operations_before = int(np.searchsorted(first.operation_event, event, side="right"))
        # The event belongs to the last operation that begins at or before it.
        by_event = max(0, operations_before - 1)
        return by_event if by_name is None else min(by_name, by_event)
    if by_name is not None:
        return by_name
    return _first_unequal(first.operation_event, other.operation_event)


def _resident_sizes(trace: Trace) -> list[tuple[int, int, int]]:
    """Return the owner, module and size of each resident storage that the batch cannot affect."""
    resident = np.array(trace.resident, dtype=np.int64)
    resident = resident[np.isin(trace.owner[resident], _BATCH_INDEPENDENT)]
    columns = (trace.owner, trace.module, trace.size_bytes)
    return list(zip(*(column[resident].tolist() for column in columns), strict=True))


def _first_unequal(first: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int | None:
    """Return the first index at which two arrays differ, or None if they are equal.

    If one array is a prefix of the other, they differ at the end of the shorter one.
    """
    shared = min(len(first), len(other))
    unequal = np.flatnonzero(first[:shared] != other[:shared])
    if len(unequal):
        return int(unequal[0])
    return None if len(first) == len(other) else shared


def _describe_operation(trace: Trace, number: int) -> str:
    """Return an operation's name and the last line of user code that had allocated memory by then.

    Returns:
        A text such as ``"aten.mm at model.py:31 in forward"``. ``"missing"`` if the trace has no
        operation with this number.
    """
    if number >= len(trace.operation_name):
        return "missing"
    name = trace.names[int(trace.operation_name[number])]
    # Find the lines that allocated storages before the operation ended. The events of an operation
    # end where the next operation begins.
    is_last = number + 1 == len(trace.operation_event)
    end = len(trace.events) if is_last else trace.operation_event[number + 1]
    events = trace.events[:end]
    allocated_storages = storage_of(events[is_allocation(events)])
    lines = trace.line[allocated_storages]
    # Line number 0 means that the line is unknown.
    known_lines = lines[lines > 0]
    if not len(known_lines):
        return name
    return f"{name} at {trace.lines[known_lines[-1]]}"
