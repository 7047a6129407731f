"""Curves over steps: the mean of each stretch of steps, and the least and most in it.

Every peak can be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.recorder.history import NAMES, Rows, at_most, rows_of
from holdfast.recorder.ring import read_ring, slot_struct
from holdfast.recorder.scalars import Scalar

Numbers = NDArray[np.float64]
Moments = tuple[Numbers, Numbers]

# A screen has some 4,000 columns of pixels at most: enough to draw a curve of any length as an eye
# would see it.
MOST_POINTS = 2000
OF_AN_OPTIMIZER = NAMES[:3]  # curves that make no sense for several together
LOGGED = "logged: "  # before the name of a curve that the script named
MOST_LOGGED = 24  # panels
# A step that was given is the training's within this and a factor of 2, else epochs or samples
_NEAR = 10
# Of one number, otherwise as those of ``history``
_ROW = [("number", "<u8"), ("optimizer", "u1"), ("step", "<f8")]
_ROW += [(name, "<f8") for name in ("low", "mean", "high")] + [
    (name, "<u4") for name in ("finite", "odd")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve over steps, in the order in which they were made.

    NaN in a gap, as where the run went back.

    `nonfinite` are the steps where a value is infinite or NaN. Where values are means of several
    steps, `band` has
    the steps, the least and the most. `own_scale`: steps are what the script gave, not those of the
        training.
    """

    steps: Numbers
    values: Numbers
    nonfinite: Numbers
    band: tuple[Numbers, Numbers, Numbers] | None
    own_scale: bool = False

    @property
    def finite(self) -> Numbers:
        """Return the finite values, the least and the most included."""
        values: Numbers = np.concatenate([self.values, *(self.band or ())[1:]])
        return values[np.isfinite(values)]


def rows_of_ring(path: Path) -> Rows:
    """Return a row of ``history`` for each record that a ring of steps holds, oldest first.

    H305 as `read_ring`.
    """
    records = read_ring(path)
    slot = slot_struct(len(records[0].payload) if records else 0)
    slots = b"".join(
        slot.pack(each.sequence, each.nanoseconds, each.payload, each.sequence) for each in records
    )
    return rows_of(slots, slot.size)[0]


def thinned(old: Rows, ring: Rows, most: int = MOST_POINTS) -> Rows:
    """Return the rows that are drawn.

    Half of them for what the ring of a process does not hold any more.
    """
    return np.concatenate([at_most(old, most // 2), at_most(ring, most // 2, finest=2)])


def columns(rows: Rows) -> dict[str, Series]:
    """Return the curves of a process by name."""
    steps = rows["step"].astype(np.float64)
    found = {
        name: _series(
            steps, *(rows[field][:, place] for field in ("finite", "odd", "mean", "low", "high"))
        )
        for place, name in enumerate(NAMES)
    }
    seconds, wait = (rows["mean"] * rows["finite"])[
        :, [NAMES.index("seconds"), NAMES.index("wait_seconds")]
    ].T
    known = (seconds > 0) & (rows["finite"][:, NAMES.index("wait_seconds")] > 0)
    share = np.clip(wait / np.where(known, seconds, 1.0), 0.0, 1.0)
    found |= {
        "wait_seconds": None,
        "wait_share": _series(steps, known, known & False, share, share, share),
    }
    return {name: each for name, each in found.items() if each is not None}


def columns_of_scalars(
    scalars: Sequence[Scalar], moments: Moments, most: int = MOST_POINTS
) -> dict[str, Series]:
    """Return the curves of the first names that were logged, each after `LOGGED`.

    `moments` as in a `Lane`.
    """
    by_name: dict[str, list[tuple[float, float, float]]] = {}
    for each in scalars:
        by_name.setdefault(each.name, []).append((each.step, each.value, each.unix_seconds))
    found: dict[str, Series] = {}
    for name in list(by_name)[:MOST_LOGGED]:
        steps, values, times = np.array(by_name[name], np.float64).T
        trained = np.interp(times[-1], *moments) if len(moments[0]) else steps[-1]
        own = not trained / 2 - _NEAR <= steps[-1] <= 2 * trained + _NEAR
        rows, finite = np.zeros(len(steps), _ROW), np.isfinite(values)
        rows["number"], rows["step"], rows["finite"], rows["odd"] = (
            np.arange(len(steps)),
            steps,
            finite,
            ~finite,
        )
        for field, unknown in (("low", np.inf), ("mean", 0.0), ("high", -np.inf)):
            rows[field] = np.where(finite, values, unknown)
        rows = at_most(rows, most // 2, finest=2)
        drawn = _series(
            *(rows[field] for field in ("step", "finite", "odd", "mean", "low", "high"))
        )
        found |= {} if drawn is None else {LOGGED + name: replace(drawn, own_scale=own)}
    return found


def _series(steps: Numbers, finite: Numbers, odd: Numbers, *numbers: Numbers) -> Series | None:
    """Return a curve of mean, least and most, or None.

    ``finite`` and ``odd`` say how many values of a row are.
    """
    mean, low, high = numbers
    read, known = (finite > 0) | (odd > 0), finite > 0
    if not read.any():
        return None
    x, y = steps[read], np.where(known, mean, np.nan)[read]
    back = np.flatnonzero(np.diff(x) < 0) + 1  # a line would be drawn there that nobody trained
    band = (steps[known], low[known], high[known]) if (low < high).any() else None
    x, y = np.insert(x, back, np.nan), np.insert(y, back, np.nan)
    return Series(steps=x, values=y, nonfinite=steps[odd > 0], band=band)
