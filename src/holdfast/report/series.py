"""Curves over steps, thinned so that every dip and peak that was recorded can still be seen.

Does not: draw (``figures``), find the files (``gathering``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.recorder.progress import LOSS_IS_READ, NORM_IS_READ, RATE_IS_READ
from holdfast.recorder.reader import StepRecord
from holdfast.recorder.ring import HEADER, HEADER_BYTES, MAGIC, VERSION, read_ring

Numbers = NDArray[np.float64]
Samples = NDArray[np.void]
# A slot of the ring of samples (``recorder.ring``, ``recorder.progress``); a test holds it to what is read there.
_SLOT = np.dtype(
    [("first", "<u8"), ("nanoseconds", "<u8"), ("step", "<u8"), ("micro_steps", "<u4"), ("is_read", "<u4")]
    + [(name, "<f8") for name in ("loss", "grad_norm", "learning_rate", "seconds", "wait_seconds")]
    + [(f"{name}_bytes", "<u8") for name in ("host", "device_allocated", "device_reserved", "device_peak")]
    + [("last", "<u8")]
)

# A screen has some 4,000 columns of pixels at most; four points for each of 500 buckets are enough to draw a curve
# of any length as an eye would see it, and to zoom in by a factor of several.
MOST_POINTS = 2000
_SHARE_BUCKETS = 400
_MARKS_OF_VALUES = {"loss": LOSS_IS_READ, "grad_norm": NORM_IS_READ, "learning_rate": RATE_IS_READ}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve.

    Args:
        steps: Optimizer steps, in the order in which they were made; NaN in a gap where the run went back.
        values: As many values; NaN in a gap.
        nonfinite: Steps whose value is infinite or NaN.
    """

    steps: Numbers
    values: Numbers
    nonfinite: Numbers


def thin(steps: Numbers, values: Numbers, most: int = MOST_POINTS) -> tuple[Numbers, Numbers]:
    """Keep first, last, smallest and largest finite value of each of ``most // 4`` buckets, and one non-finite."""
    count = len(values)
    if count <= most:
        return steps, values
    edges = np.linspace(0, count, max(most // 4, 1) + 1).astype(np.int64)
    first = edges[:-1]
    finite = np.isfinite(values)
    low = _first_matches(np.where(finite, values, np.inf), first, np.minimum)
    high = _first_matches(np.where(finite, values, -np.inf), first, np.maximum)
    gaps = _first_of_each(np.flatnonzero(~finite), first)
    kept = np.unique(np.concatenate([first, edges[1:] - 1, low, high, gaps]))
    return steps[kept], values[kept]


def _first_matches(values: Numbers, first: NDArray[np.int64], reduce: np.ufunc) -> NDArray[np.int64]:
    """Return an index of the smallest or largest value of each bucket; ``first`` begins each bucket."""
    best = np.repeat(reduce.reduceat(values, first), np.diff(np.append(first, len(values))))
    return _first_of_each(np.flatnonzero(values == best), first)


def _first_of_each(indices: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
    return indices[np.unique(np.searchsorted(first, indices, side="right"), return_index=True)[1]]


def series(
    steps: Numbers, values: Numbers, read: NDArray[np.bool_] | None = None, *, most: int = MOST_POINTS
) -> Series | None:
    """Return a curve of the values that were read (None: all that are not NaN), or None without any."""
    read = ~np.isnan(values) if read is None else read
    if not read.any():
        return None
    steps, values = steps[read], values[read]
    thinned_steps, thinned = thin(steps, values, most)
    bad = ~np.isfinite(thinned)
    x, y = _broken_where_steps_go_back(thinned_steps, np.where(bad, np.nan, thinned))
    return Series(steps=x, values=y, nonfinite=thinned_steps[bad])


def _broken_where_steps_go_back(steps: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """Insert a gap wherever the steps go back, where a line would be drawn that nobody trained."""
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    return np.insert(steps, back, np.nan), np.insert(values, back, np.nan)


def read_sample_array(path: Path) -> Samples:
    """Return the samples of a ring, oldest first, as an array: a full ring takes milliseconds this way.

    Raises:
        RunDirectoryError: H305, as `read_ring`.
    """
    data = path.read_bytes() if path.exists() else b""
    if len(data) < HEADER_BYTES:
        return np.zeros(0, _SLOT)
    magic, version, payload_bytes, capacity = HEADER.unpack_from(data)
    if magic != MAGIC or version > VERSION:
        read_ring(path)  # says what is wrong
    if payload_bytes + 24 != _SLOT.itemsize:
        return np.zeros(0, _SLOT)  # another kind of ring, or a damaged header
    count = (len(data) - HEADER_BYTES) // _SLOT.itemsize
    slots = np.frombuffer(data, _SLOT, count, HEADER_BYTES)
    placed = slots["first"] % max(capacity, 1) == np.arange(count)
    whole: Samples = slots[
        (slots["first"] > 0) & (slots["first"] < 2**62) & (slots["first"] == slots["last"]) & placed
    ]
    ordered: Samples = whole[np.argsort(whole["first"])]
    return ordered


def columns_of_samples(samples: Samples, most: int = MOST_POINTS) -> dict[str, Series]:
    """Return the curves of a process that were recorded, by name."""
    found: dict[str, Series | None] = {}
    steps = samples["step"].astype(np.float64)
    for name, mark in _MARKS_OF_VALUES.items():
        read = (samples["is_read"] & mark > 0) | ~np.isnan(samples[name])
        found[name] = series(steps, samples[name], read, most=most)
    found["seconds"] = series(steps, samples["seconds"], most=most)
    found["wait_share"] = wait_share(steps, samples["seconds"], samples["wait_seconds"])
    for name in ("host_bytes", "device_allocated_bytes", "device_reserved_bytes", "device_peak_bytes"):
        values = samples[name].astype(np.float64)
        found[name] = series(steps, np.where(values > 0, values, np.nan), most=most)
    return {name: each for name, each in found.items() if each is not None}


def columns_of_marks(records: Sequence[StepRecord], most: int = MOST_POINTS) -> dict[str, Series]:
    """Return the curves that a guard's marks of finished steps hold, by name."""
    found = {}
    for name in ("loss", "grad_norm", "seconds"):
        pairs = [(each.global_step, value) for each in records if (value := getattr(each, name)) is not None]
        points = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        found[name] = series(points[:, 0], points[:, 1], np.ones(len(pairs), bool), most=most)
    return {name: each for name, each in found.items() if each is not None}


def wait_share(steps: Numbers, seconds: Numbers, wait: Numbers) -> Series | None:
    """Return the share of time that went into waiting for the loader, over buckets of steps."""
    known = np.isfinite(seconds) & np.isfinite(wait) & (seconds > 0)
    steps, seconds, wait = steps[known], seconds[known], wait[known]
    if not len(steps):
        return None
    first = np.unique(np.linspace(0, len(steps), _SHARE_BUCKETS, endpoint=False).astype(np.int64))
    share = np.clip(np.add.reduceat(wait, first) / np.add.reduceat(seconds, first), 0.0, 1.0)
    x, y = _broken_where_steps_go_back(steps[first], share)
    return Series(steps=x, values=y, nonfinite=np.array([]))
