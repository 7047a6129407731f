"""The effect of a training step on device memory: allocations and frees, with their owners.

A `Trace` describes one *steady* step, which can be repeated any number of times. It consists of the
storages that are resident when the step begins, and of the step's events. A step may also replace
resident storages: the gradients of this step, for example, take the place of those of the previous
one, and the next step finds them there (`Trace.carried`).

Sizes are the requested ones in bytes; the allocator rounds them. `tracer` records traces, and
`extrapolation` scales them to other sizes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

PHASES = ("forward", "backward", "optimizer", "other")
# If a storage has several owners, the first of these counts.
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

# The operators that call cuBLAS and allocate its workspace at their first call.
_MATRIX_PRODUCTS = frozenset(
    f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
)
# The index of a layer in a module's path: "layers.3.fc1".
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
# The most modules and lines that are named.
_MOST_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """An assumption of the forecast.

    Args:
        what: The assumption, a sentence without a full stop.
        line: The line of user code that it concerns, ``"model.py:31 in forward"``, or "".
    """

    what: str
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One steady training step.

    Args:
        events: Shape ``(events,)``, int32: ``s + 1`` allocates storage ``s``, ``-(s + 1)`` frees
            it.
        event_phase: Shape ``(events,)``, int8, index into `PHASES`.
        size_bytes: Shape ``(storages,)``, int64.
        owner: Shape ``(storages,)``, int8, index into `OWNERS`.
        module: Shape ``(storages,)``, int32, index into `modules`: the module that was running.
        line: Shape ``(storages,)``, int32, index into `lines`: the user's line that was running.
        operation_name: Shape ``(operations,)``, int32, index into `names`.
        operation_event: Shape ``(operations,)``, int32: number of events before the operation,
            which is the position of its first own event.
        operation_phase: Shape ``(operations,)``, int8, index into `PHASES`.
        flops: Shape ``(operations,)``, int64, floating-point operations.
        moved_bytes: Shape ``(operations,)``, int64: bytes that it reads and writes.
        dtype: Shape ``(operations,)``, int8, index into `DTYPES`: the type it computes in.
        modules: Paths such as ``"model.encoder.layers.0"``; the first is empty.
        lines: Such as ``"model.py:31 in forward"``; the first is empty.
        names: Names of operations, such as ``"aten.mm"``.
        resident: Storages that are alive when the step begins, in the order of their allocation.
            They come before all storages that the step allocates.
        carried: Pairs of storages (new, old): the step leaves the new one behind, and it takes the
            place of the old one, which was resident, when the next step begins.
        growth_bytes: Bytes that a step leaves behind in addition: a leak, or a history that the
            user keeps.
        blocks: Paths of the modules that could be recomputed.
        optimizer_steps: For each optimizer step, its first event and the one after its last.
        micro_batch_size: Samples in the traced batch.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        route: The fake device on which it was traced, ``"privateuse1"`` or ``"cpu"``.
        assumptions: The assumptions.
        uncalibrated_bytes: How much higher the peak may be, because the scratch memory of some
            kernels is not known exactly.
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
        """Return the trace that `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            fields: dict[str, Any] = {name: file[name] for name in file.files}
        rest = json.loads(str(fields.pop("rest")))
        fields |= {name: _with_tuples(value) for name, value in rest.items()}
        fields["assumptions"] = tuple(
            Assumption(**assumption) for assumption in fields["assumptions"]
        )
        return cls(**fields)


def _with_tuples(value: Any) -> Any:
    """Return JSON lists as tuples, all the way down."""
    if isinstance(value, list):
        return tuple(_with_tuples(item) for item in value)
    return value


def repeat_steps(trace: Trace, steps: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return the events of several steps in a row, after allocating the resident storages.

    Storages that a step leaves behind replace those that it found, by `Trace.carried`. Storages
    that it found and freed without a replacement are gone in later steps, and storages that it left
    without replacing any stay.

    Returns:
        Events as in `Trace.events`, with new storages in each step, and the sizes of all storages
        in bytes.
    """
    resident_count = len(trace.resident)
    allocated_count = len(trace.size_bytes) - resident_count
    storage = np.abs(trace.events) - 1
    is_free = trace.events < 0
    frees_resident = is_free & (storage < resident_count)
    # Two columns: the new storages, and the resident ones that they replace.
    carried = np.array(trace.carried, dtype=np.int32).reshape(-1, 2)
    # For each resident storage of the trace, the storage that is in its place when the next step
    # begins; -1 if it was freed and not replaced.
    current = np.arange(resident_count, dtype=np.int32)
    parts = [current + 1]
    for step in range(steps):
        # The storages that this step allocates get numbers of their own.
        begin = resident_count + step * allocated_count
        allocated = np.arange(begin, begin + allocated_count, dtype=np.int32)
        # The number in this step of each storage of the trace.
        renamed = np.concatenate([current, allocated])
        ids = renamed[storage] + 1
        # An id of 0 belongs to a storage that no longer exists, so its event is left out.
        parts.append(np.where(is_free, -ids, ids)[ids > 0])
        current = current.copy()
        current[storage[frees_resident]] = -1
        current[carried[:, 1]] = renamed[carried[:, 0]]
    resident_sizes = trace.size_bytes[:resident_count]
    allocated_sizes = trace.size_bytes[resident_count:]
    sizes = np.concatenate([resident_sizes, *[allocated_sizes] * steps])
    return np.concatenate(parts).astype(np.int32), sizes


def first_products(trace: Trace) -> tuple[int, int]:
    """Return the positions of the first matrix products of the forward and the backward pass.

    Returns:
        For each, the number of events of `repeat_steps` until the result of the product is
        allocated; 0 if the pass has no product.
    """
    return _first_product(trace, "forward"), _first_product(trace, "backward")


def _first_product(trace: Trace, phase: str) -> int:
    """Return the number of events until the first matrix product of a phase; 0 for none."""
    is_product = np.array([name in _MATRIX_PRODUCTS for name in trace.names], dtype=bool)
    in_phase = trace.operation_phase == PHASES.index(phase)
    events = trace.operation_event[is_product[trace.operation_name] & in_phase]
    if not len(events):
        return 0
    # `repeat_steps` allocates the resident storages first. The next event after those before the
    # product is the allocation of its result.
    return len(trace.resident) + int(events[0]) + 1


def live_bytes(
    events: npt.NDArray[np.int32], size_bytes: npt.NDArray[np.int64], granule_bytes: int = 1
) -> npt.NDArray[np.int64]:
    """Return how many bytes are alive after each event of `repeat_steps`.

    Args:
        events: Allocations and frees.
        size_bytes: Bytes of each storage.
        granule_bytes: Sizes are rounded up to a multiple of this. CUDA's caching allocator counts
            in granules of 512 bytes.
    """
    rounded = -(-size_bytes // granule_bytes) * granule_bytes
    return np.cumsum(np.sign(events) * rounded[np.abs(events) - 1], dtype=np.int64)


def live_peak(trace: Trace, granule_bytes: int = 1) -> int:
    """Return the most bytes that are alive at once in a step, including what is resident."""
    events, sizes = repeat_steps(trace, 1)
    return int(live_bytes(events, sizes, granule_bytes).max(initial=0))


def owners_at_peak(
    trace: Trace, by: Literal["owner", "module", "line"] = "owner"
) -> Mapping[str, int]:
    """Return the owners of the bytes that are alive when `live_peak` is first reached.

    Returns:
        Bytes by owner, module or line, largest first. They add up to the peak. Bytes whose module
        or line is not known are under the empty name.
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
    np.add.at(is_live, np.abs(until_peak) - 1, np.sign(until_peak))
    totals = np.zeros(len(names), dtype=np.int64)
    np.add.at(totals, index, is_live * sizes)
    return {
        names[number]: int(totals[number])
        for number in np.argsort(-totals, kind="stable")
        if totals[number]
    }


def shares_of(trace: Trace) -> dict[str, Mapping[str, int]]:
    """Return the bytes at the live peak by owners, modules and the user's lines, largest first.

    The layers of a stack count as one module: their index is ``*``.
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
