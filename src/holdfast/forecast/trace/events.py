"""What one traced training step does to the memory of a device.

Allocations and frees in order, with who owns them.

A `Trace` is a template of one *steady* step: what is resident when it begins, the events of the
    step, and which of
the storages that it leaves behind take the place of which that it found (the gradients that the
next step frees). So
it can be played any number of times. Sizes belong to storages, in bytes as requested: rounding is
    the allocator's
business.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PHASES = ("forward", "backward", "optimizer", "other")
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
_PRODUCTS = frozenset(
    f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MOST = 6  # modules and lines that are named


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """Something that the trace had to take for granted, and the user's line, ``"model.py:31 in
    forward"``, or "".
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
        line: Shape ``(storages,)``, int32, index into `lines`: the line of the user's.
        operation_name: Shape ``(operations,)``, int32, index into `names`.
        operation_event: Shape ``(operations,)``, int32: events before it, and so before what it
            allocates.
        operation_phase: Shape ``(operations,)``, int8.
        flops: Shape ``(operations,)``, int64, floating point operations.
        moved_bytes: Shape ``(operations,)``, int64: sizes of what it reads and writes.
        dtype: Shape ``(operations,)``, int8, index into `DTYPES`: what it computes in.
        modules: Paths such as ``"model.encoder.layers.0"``; the first is empty.
        lines: Such as ``"model.py:31 in forward"``; the first is empty.
        names: Of operations, such as ``"aten.mm"``.
        resident: Storages that live when the step begins, in the order of their allocation; all are
            below the ids that the step allocates.
        carried: Pairs (left by the step, found by it): the next step finds the first in place of
            the second.
        growth_bytes: What a step leaves behind beyond that: a leak, or a history that the user
            keeps.
        blocks: Paths of the modules that could be recomputed.
        optimizer_steps: First event of each step of an optimizer, and the one after its last.
        micro_batch_size: Samples in the traced batch.
        uncalibrated_bytes: By how much the peak may be higher: not of all kernels is it known what
            they allocate for themselves.
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
        """Write the trace into one file (numpy's ``.npz``, without pickles), whatever the name
        ends with.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        arrays: dict[str, Any] = {
            name: value for name, value in values.items() if isinstance(value, np.ndarray)
        }
        rest = {name: value for name, value in values.items() if name not in arrays}
        with path.open("wb") as file:
            np.savez(file, rest=np.array(json.dumps(rest, default=dataclasses.asdict)), **arrays)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Return what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            fields: dict[str, Any] = {name: file[name] for name in file.files}
        fields |= {
            name: _frozen(value) for name, value in json.loads(str(fields.pop("rest"))).items()
        }
        fields["assumptions"] = tuple(Assumption(**one) for one in fields["assumptions"])
        return cls(**fields)


def _frozen(value: Any) -> Any:
    """Return lists as tuples, all the way down."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def played(trace: Trace, steps: int = 3) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return what several steps in a row do, beginning with the allocation of what is resident.

    What a step leaves behind takes the place of what it found, by `Trace.carried`; what it found
    and freed without such a successor is gone in the later steps, and what it left without one
    stays. Events are as in `Trace.events`, with new storages in each step; sizes are of all
    storages, in bytes.
    """
    found = len(trace.resident)
    made = len(trace.size_bytes) - found
    events = trace.events
    storage = np.abs(events) - 1
    frees = events < 0
    pairs = np.array(trace.carried, dtype=np.int32).reshape(-1, 2)
    current = np.arange(found, dtype=np.int32)
    parts = [current + 1]
    for step in range(steps):
        name = np.concatenate(
            [current, np.arange(found + step * made, found + (step + 1) * made, dtype=np.int32)]
        )
        ids = name[storage] + 1
        parts.append(np.where(frees, -ids, ids)[ids > 0])
        current = current.copy()
        current[storage[frees & (storage < found)]] = -1
        current[pairs[:, 1]] = name[pairs[:, 0]]
    sizes = np.concatenate([trace.size_bytes[:found], *[trace.size_bytes[found:]] * steps])
    return np.concatenate(parts).astype(np.int32), sizes


def first_products(trace: Trace) -> tuple[int, int]:
    """Return after how many events of `played` forward's and backward's first product has its
    result; 0 without.
    """
    of_products = np.array([name in _PRODUCTS for name in trace.names], dtype=bool)[
        trace.operation_name
    ]
    forward, backward = (
        trace.operation_event[of_products & (trace.operation_phase == PHASES.index(phase))][:1]
        + len(trace.resident)
        + 1
        for phase in ("forward", "backward")
    )
    return int(forward.sum()), int(backward.sum())


def live_bytes(
    events: npt.NDArray[np.int32], size_bytes: npt.NDArray[np.int64], granule_bytes: int = 1
) -> npt.NDArray[np.int64]:
    """Return how many bytes live after each event of `played`, sizes rounded up to granules.

    CUDA's caching allocator counts as allocated in granules of 512 bytes.
    """
    rounded = -(-size_bytes // granule_bytes) * granule_bytes
    return np.cumsum(np.sign(events) * rounded[np.abs(events) - 1], dtype=np.int64)


def live_peak(trace: Trace, granule_bytes: int = 1) -> int:
    """Return the most bytes that live at once in a step, what is resident included."""
    return int(live_bytes(*played(trace, 1), granule_bytes).max(initial=0))


def owners_at_peak(trace: Trace, by: str = "owner") -> Mapping[str, int]:
    """Return who owns the bytes that are alive at the first moment of `live_peak`.

    Bytes are by ``"owner"``, ``"module"`` or ``"line"``, largest first, and add up to the peak;
    what none is known of goes by the empty name.
    """
    choices: dict[str, tuple[tuple[str, ...], npt.NDArray[np.integer[Any]]]] = {
        "owner": (OWNERS, trace.owner),
        "module": (trace.modules, trace.module),
        "line": (trace.lines, trace.line),
    }
    names, index = choices[by]
    events, sizes = played(trace, 1)
    if not len(events):
        return {}
    until = events[: int(live_bytes(events, sizes).argmax()) + 1]
    live = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(live, np.abs(until) - 1, np.sign(until))
    totals = np.zeros(len(names), dtype=np.int64)
    np.add.at(totals, index, live * sizes)
    return {
        names[number]: int(totals[number])
        for number in np.argsort(-totals, kind="stable")
        if totals[number]
    }


def shares_of(trace: Trace) -> dict[str, Mapping[str, int]]:
    """Return bytes at the live peak by owners, modules (numbers as ``*``) and lines of the
    user's, largest first.
    """
    modules: dict[str, int] = {}
    for name, size in owners_at_peak(trace, "module").items():
        path = _NUMBER.sub("*", name)
        modules[path] = modules.get(path, 0) + size
    return {
        "owners": owners_at_peak(trace),
        "modules": _largest(modules),
        "lines": _largest(owners_at_peak(trace, "line")),
    }


def _largest(sizes: Mapping[str, int]) -> dict[str, int]:
    known = sorted(((size, name) for name, size in sizes.items() if name), reverse=True)
    return {name: size for size, name in known[:_MOST]}
