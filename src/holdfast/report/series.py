"""Curves over steps, thinned so that every dip and peak that was recorded can still be seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.recorder.progress import StepSample
from holdfast.recorder.reader import StepRecord
from holdfast.recorder.scalars import Scalar

Numbers = NDArray[np.float64]

# A screen has some 4,000 columns of pixels at most; four points for each of 500 buckets are enough to draw a curve
# of any length as an eye would see it, and to zoom in by a factor of several.
MOST_POINTS = 2000
LOGGED = "logged: "  # before the name of a curve that the script named
MOST_LOGGED = 24  # panels
_SHARE_BUCKETS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve over steps, in the order in which they were made; NaN in a gap, as where the run went back.

    `nonfinite` are the steps whose value is infinite or NaN.
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


def columns_of_samples(samples: Sequence[StepSample], most: int = MOST_POINTS) -> dict[str, Series]:
    """Return the curves of a process that were recorded, by name."""
    steps, seconds, wait = (
        np.array([getattr(each, name) for each in samples], np.float64)
        for name in ("step", "seconds", "wait_seconds")
    )
    found = _columns(samples, "step", ("loss", "grad_norm", "learning_rate"), most)
    found |= {"seconds": series(steps, seconds, most=most), "wait_share": wait_share(steps, seconds, wait)}
    for name in ("host_bytes", "device_allocated_bytes", "device_reserved_bytes", "device_peak_bytes"):
        sizes = np.array([getattr(each, name) or math.nan for each in samples], np.float64)
        found[name] = series(steps, sizes, most=most)
    return {name: each for name, each in found.items() if each is not None}


def columns_of_scalars(scalars: Sequence[Scalar], most: int = MOST_POINTS) -> dict[str, Series]:
    """Return the curves of the first names that were logged, each after `LOGGED`."""
    by_name: dict[str, list[Scalar]] = {}
    for each in scalars:
        by_name.setdefault(each.name, []).append(each)
    first = {name: _columns(by_name[name], "step", ("value",), most // 2) for name in list(by_name)[:MOST_LOGGED]}
    return {LOGGED + name: curve for name, columns in first.items() if (curve := columns["value"]) is not None}


def columns_of_marks(records: Sequence[StepRecord], most: int = MOST_POINTS) -> dict[str, Series]:
    """Return the curves that a guard's marks of finished steps hold, by name."""
    found = _columns(records, "global_step", ("loss", "grad_norm", "seconds"), most)
    return {name: each for name, each in found.items() if each is not None}


def _columns(records: Sequence[object], step: str, names: Sequence[str], most: int) -> dict[str, Series | None]:
    """Return curves of what was read: NaN is a value, None is not."""
    found = {}
    for name in names:
        pairs = [(getattr(each, step), value) for each in records if (value := getattr(each, name)) is not None]
        points = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        found[name] = series(points[:, 0], points[:, 1], np.ones(len(pairs), bool), most=most)
    return found


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
