"""Define `Trace`: the allocations and frees in a training step, and who owns the memory.

A trace describes one *steady* step, which can be repeated any number of times. It lists the
storages that are resident when the step begins, and the step's events: allocations and frees of
storages. A step may replace resident storages. For example, it may free the gradients of the
previous step and leave its own gradients behind for the next step (`Trace.carried`).

An event is an integer that encodes a storage and whether it is allocated or freed; see
`allocation_of`. Sizes are requested bytes, before the allocator rounds them. `tracer` records
traces, and `extrapolation` scales them to other batch sizes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

PHASES = ("forward", "backward", "optimizer", "other")
# If a storage has several owners, the first one in this list counts.
OWNERS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "batch",
    "activations",
    "scratch",
    "other",
)
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp64", "other")

# The operators that call cuBLAS. The first such call allocates the cuBLAS workspace.
_MATRIX_PRODUCTS = frozenset(
    f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
)
# Matches the index of a layer in the path of a module, such as the 3 in "layers.3.fc1".
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
# The largest number of modules, and of lines, that `shares_of` lists.
_MOST_NAMED = 6
# Used in place of a storage's number if the storage was freed and not replaced.
_GONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """An assumption behind a forecast, which is shown to the user.

    Args:
        what: The assumption, as a sentence that starts in lower case and has no final period.
        line: The line of user code that made the assumption necessary, such as
            ``"model.py:31 in forward"``. Empty if the assumption concerns no particular line.
    """

    what: str
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The record of one steady training step.

    Args:
        events: Shape ``(events,)``, int32: allocations and frees in the order in which they
            happened, encoded by `allocation_of` and `free_of`.
        event_phase: Shape ``(events,)``, int8, index into `PHASES`.
        size_bytes: Shape ``(storages,)``, int64: requested bytes.
        owner: Shape ``(storages,)``, int8, index into `OWNERS`.
        module: Shape ``(storages,)``, int32, index into `modules`: the module that allocated the
            storage.
        line: Shape ``(storages,)``, int32, index into `lines`: the line that allocated the storage.
        operation_name: Shape ``(operations,)``, int32, index into `names`.
        operation_event: Shape ``(operations,)``, int32: number of events before the operation. This
            is also the position of the first event of the operation, if it has any.
        operation_phase: Shape ``(operations,)``, int8, index into `PHASES`.
        flops: Shape ``(operations,)``, int64: floating-point operations.
        moved_bytes: Shape ``(operations,)``, int64: bytes that are read and written.
        dtype: Shape ``(operations,)``, int8, index into `DTYPES`: the data type in which the
            operation computes.
        modules: Paths such as ``"model.encoder.layers.0"``. The first path is empty and means that
            no module is known.
        lines: Lines of user code such as ``"model.py:31 in forward"``. The first one is empty and
            means that the line is unknown.
        names: Names of operations, such as ``"aten.mm"``.
        resident: Storages that are alive when the step begins, in the order of their allocation.
            Their numbers are lower than those of all storages that the step allocates.
        carried: Pairs of storages (new, old). The old storage is resident, and the step frees it.
            The step allocates the new storage and leaves it behind, so that the next step finds it
            in place of the old one.
        growth_bytes: By how many bytes the memory in use grows in each step, for example because of
            a leak or because user code keeps a history.
        blocks: Paths of the modules whose activations could be recomputed.
        optimizer_steps: For each optimizer step, the position of its first event and the position
            after its last event.
        micro_batch_size: Samples in the traced batch.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        route: The type of the fake device on which the step ran, ``"privateuse1"`` or ``"cpu"``.
        assumptions: The assumptions behind the trace.
        uncalibrated_bytes: How many bytes higher the peak may be, because the scratch memory of
            some kernels is not known exactly.
    """

    events: npt.NDArray[np.int32]
    event_phase: npt.NDArray[np.int8]
    size_bytes: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int8]
    module: npt.NDArray[np.int32]
    line: npt.NDArray[np.int32]
    operation_name: npt.NDArray[np.int32]
    operation_event: npt.NDArray[np.int32]
    operation_phase: npt.NDArray[np.int8]
    flops: npt.NDArray[np.int64]
    moved_bytes: npt.NDArray[np.int64]
    dtype: npt.NDArray[np.int8]
    modules: tuple[str, ...]
    lines: tuple[str, ...]
    names: tuple[str, ...]
    resident: tuple[int, ...]
    carried: tuple[tuple[int, int], ...]
    growth_bytes: int
    blocks: tuple[str, ...]
    optimizer_steps: tuple[tuple[int, int], ...]
    micro_batch_size: int
    precision: str
    route: str
    assumptions: tuple[Assumption, ...]
    uncalibrated_bytes: int = 0

    def save(self, path: Path) -> None:
        """Write the trace to a file in numpy's ``.npz`` format, without pickles."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        arrays: dict[str, Any] = {
            name: value for name, value in values.items() if isinstance(value, np.ndarray)
        }
        rest = {name: value for name, value in values.items() if name not in arrays}
        with path.open("wb") as file:
            np.savez(file, rest=np.array(json.dumps(rest, default=dataclasses.asdict)), **arrays)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Load a trace from a file written by `save`."""
        with np.load(path, allow_pickle=False) as file:
            fields: dict[str, Any] = {name: file[name] for name in file.files}
        rest = json.loads(str(fields.pop("rest")))
        fields |= {name: _with_tuples(value) for name, value in rest.items()}
        fields["assumptions"] = tuple(
            Assumption(**assumption) for assumption in fields["assumptions"]
        )
        return cls(**fields)


def _with_tuples(value: Any) -> Any:
    """Convert a list that was read from JSON, and all lists nested in it, to tuples."""
    if isinstance(value, list):
        return tuple(_with_tuples(item) for item in value)
    return value


# --- the encoding of events -----------------------------------------------------------------------
#
# An event is a signed integer: positive for an allocation, negative for a free. Its magnitude is
# the storage's number plus 1, because 0 has no sign. The four functions below accept an integer or
# an array of integers.

_Integers = TypeVar("_Integers", int, npt.NDArray[Any])


def allocation_of(storage: _Integers) -> _Integers:
    """Return the event that allocates a storage."""
    return storage + 1


def free_of(storage: _Integers) -> _Integers:
    """Return the event that frees a storage."""
    return -(storage + 1)


def storage_of(event: _Integers) -> _Integers:
    """Return the number of the storage that an event allocates or frees."""
    return abs(event) - 1


def is_allocation(event: Any) -> Any:
    """Return whether an event is an allocation; otherwise it is a free."""
    return event > 0


# --- computations on events -----------------------------------------------------------------------


def repeat_steps(trace: Trace, steps: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return the events of several steps, preceded by the allocations of all resident storages.

    A storage that a step leaves behind replaces the resident storage with which it is paired in
    `Trace.carried`. If it is not paired, it is never freed. A resident storage that a step frees
    without a replacement does not exist in later steps.

    Returns:
        The events, in which each step gives its storages new numbers, and the sizes of all storages
        in bytes.
    """
    resident_count = len(trace.resident)
    allocated_count = len(trace.size_bytes) - resident_count
    storage = storage_of(trace.events)
    is_free = ~is_allocation(trace.events)
    frees_resident = is_free & (storage < resident_count)
    # Two columns: the new storages, and the resident ones that they replace.
    carried = np.array(trace.carried, dtype=np.int32).reshape(-1, 2)
    # For each resident storage in the trace, the number of the storage that takes its role when the
    # next step begins, or _GONE.
    current = np.arange(resident_count, dtype=np.int32)
    parts = [allocation_of(current)]
    for step in range(steps):
        # The storages that this step allocates get new numbers.
        begin = resident_count + step * allocated_count
        allocated = np.arange(begin, begin + allocated_count, dtype=np.int32)
        # For each storage in the trace, its number in this step.
        renumbered = np.concatenate([current, allocated])
        numbers = renumbered[storage]
        events = np.where(is_free, free_of(numbers), allocation_of(numbers))
        # A storage that no longer exists cannot be freed again.
        parts.append(events[numbers != _GONE])
        current = current.copy()
        current[storage[frees_resident]] = _GONE
        current[carried[:, 1]] = renumbered[carried[:, 0]]
    resident_sizes = trace.size_bytes[:resident_count]
    allocated_sizes = trace.size_bytes[resident_count:]
    sizes = np.concatenate([resident_sizes, *[allocated_sizes] * steps])
    return np.concatenate(parts).astype(np.int32), sizes


def first_products(trace: Trace) -> tuple[int, int]:
    """Return where the forward pass and the backward pass run their first matrix products.

    Returns:
        For each of the two passes, the number of events in the result of `repeat_steps` up to and
        including the allocation of the first product's result; 0 if the pass has no matrix product.
    """
    return _first_product(trace, "forward"), _first_product(trace, "backward")


def _first_product(trace: Trace, phase: str) -> int:
    """Return the value of `first_products` for one phase."""
    is_product = np.array([name in _MATRIX_PRODUCTS for name in trace.names], dtype=bool)
    in_phase = trace.operation_phase == PHASES.index(phase)
    events = trace.operation_event[is_product[trace.operation_name] & in_phase]
    if not len(events):
        return 0
    # `repeat_steps` begins with an event for each resident storage. Add 1 for the allocation of the
    # product's result.
    return len(trace.resident) + int(events[0]) + 1


def live_bytes(
    events: npt.NDArray[np.int32], size_bytes: npt.NDArray[np.int64], granule_bytes: int = 1
) -> npt.NDArray[np.int64]:
    """Return how many bytes are alive after each event.

    Args:
        events: Allocations and frees, starting with no live storages, as in `repeat_steps`.
        size_bytes: The size of each storage in bytes.
        granule_bytes: Each size is rounded up to a multiple of this number. torch's caching
            allocator for CUDA rounds to 512 bytes.
    """
    rounded = -(-size_bytes // granule_bytes) * granule_bytes
    return np.cumsum(_signs(events) * rounded[storage_of(events)], dtype=np.int64)


def _signs(events: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return 1 for each allocation and -1 for each free."""
    return np.where(is_allocation(events), 1, -1)


def live_peak(trace: Trace, granule_bytes: int = 1) -> int:
    """Return the largest number of bytes alive at once in a step, including resident storages."""
    events, sizes = repeat_steps(trace, 1)
    return int(live_bytes(events, sizes, granule_bytes).max(initial=0))


def owners_at_peak(
    trace: Trace, by: Literal["owner", "module", "line"] = "owner"
) -> Mapping[str, int]:
    """Return who owns the bytes that are alive when `live_peak` is first reached.

    Args:
        trace: The traced step.
        by: Whether to group the bytes by owner, module or line of user code.

    Returns:
        The bytes of each owner, module or line, largest first. They add up to the peak. An empty
        key holds the bytes whose module or line is unknown.
    """
    names: tuple[str, ...]
    index: npt.NDArray[np.integer[Any]]
    if by == "owner":
        names = OWNERS
        index = trace.owner
    elif by == "module":
        names = trace.modules
        index = trace.module
    else:
        names = trace.lines
        index = trace.line
    events, sizes = repeat_steps(trace, 1)
    if not len(events):
        return {}
    peak = int(live_bytes(events, sizes).argmax())
    until_peak = events[: peak + 1]
    is_live = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(is_live, storage_of(until_peak), _signs(until_peak))
    totals = np.zeros(len(names), dtype=np.int64)
    np.add.at(totals, index, is_live * sizes)
    return {
        names[number]: int(totals[number])
        for number in np.argsort(-totals, kind="stable")
        if totals[number]
    }


def shares_of(trace: Trace) -> dict[str, Mapping[str, int]]:
    """Return the bytes that are alive at the peak, by owner, by module and by line of user code.

    Modules whose paths differ only in a layer index are combined, with ``*`` in place of the index.

    Returns:
        A dict with the keys ``"owners"``, ``"modules"`` and ``"lines"``. Each value maps names to
        bytes, largest first, and lists at most `_MOST_NAMED` modules or lines.
    """
    modules: dict[str, int] = {}
    for path, size_bytes in owners_at_peak(trace, "module").items():
        stack = _LAYER_INDEX.sub("*", path)
        modules[stack] = modules.get(stack, 0) + size_bytes
    return {
        "owners": owners_at_peak(trace),
        "modules": _largest(modules),
        "lines": _largest(owners_at_peak(trace, "line")),
    }


def _largest(sizes: Mapping[str, int]) -> dict[str, int]:
    named = [(size_bytes, name) for name, size_bytes in sizes.items() if name]
    return {name: size_bytes for size_bytes, name in sorted(named, reverse=True)[:_MOST_NAMED]}
