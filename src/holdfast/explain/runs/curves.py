"""How the losses of a run ended: not finite any more, or many orders of magnitude above their best.

Does not: judge (see ``runtime_causes``), or fit trends (see ``supervise.leaks.growth``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from holdfast.core.errors import HoldfastError
from holdfast.explain.evidence import Lost
from holdfast.recorder.progress import read_samples
from holdfast.recorder.reader import read_steps
from holdfast.recorder.run_files import SAMPLES_FILE, ProcessInfo

Point = tuple[int, float]
"""Step, or line of a log, and value."""
Between = tuple[float, float]
Curves = tuple[list[Point], list[Point]]
_FEWEST = 2
"""Lost losses at the end that count where there were good ones.

A single one may be a batch that was left out.
"""
_FEWEST_NORMS = 3
"""The same for norms of gradients, of which a loss scale that is being found makes some infinite at
first."""
_EXPLODED = 1e6
"""Rise of a loss that is no training any more. Manual loss scales reach 2**16, rewards that are not
scaled 1e4."""
_FAR = 100.0
"""Rise of the last losses over the first that is worth a word.

Single ones of healthy runs rise 40-fold.
"""
_RISEN, _LEAST_RISEN = 10.0, 0.1
"""The same of one that stays up, and what losses below count as.

Those of 91 healthy programs rose 2-fold at most.
"""
_LEAST_LEVEL = 1.0
"""Losses below count as this: one that begins at 0 has no scale of its own."""
_BLOCK = 10
_SHARE_AT_END = 20
"""An exploded loss has stayed there for one twentieth of the run."""


def lost_of_run(
    folders: Iterable[tuple[Path, ProcessInfo]], guards: Iterable[Path], between: Between
) -> tuple[Lost | None, bool]:
    """Return how the training of a run was lost, or None, and whether anybody has read a loss of
    it.

    Of the processes with the same rank the newest counts: others are of an earlier start of a
        launcher, or of a
    training that came before. Marks of guards count `between` Unix times: their rings hold all
        attempts.
    """
    newest: dict[int | None, Path] = {}
    for folder, info in sorted(folders, key=lambda pair: pair[1].started):
        newest[info.rank] = folder
    curves = [_of_samples(folder / SAMPLES_FILE) for folder in newest.values()]
    curves += [_of_marks(folder, between) for folder in guards]
    found = [find_lost(losses, norms) or find_doubt(losses) for losses, norms in curves]
    first = min(
        (each for each in found if each),
        key=lambda each: (not each.exploded, each.since),
        default=None,
    )
    return first, any(losses for losses, _ in curves)


def _of_samples(path: Path) -> Curves:
    try:
        samples = read_samples(path) if path.exists() else []
    except (HoldfastError, OSError, ValueError):
        return [], []  # damaged: then it says nothing
    return _curves((each.step, each.loss, each.grad_norm) for each in samples)


def _of_marks(folder: Path, between: Between) -> Curves:
    try:
        marks = [
            mark for mark in read_steps(folder) if between[0] <= mark.unix_seconds < between[1]
        ]
    except (HoldfastError, OSError, ValueError):
        return [], []
    return _curves((each.global_step, each.loss, each.grad_norm) for each in marks)


def _curves(steps: Iterable[tuple[int, float | None, float | None]]) -> Curves:
    known = list(steps)
    losses = [(step, loss) for step, loss, _ in known if loss is not None]
    return losses, [(step, norm) for step, _, norm in known if norm is not None]


def find_lost(
    losses: Sequence[Point], norms: Sequence[Point] = (), *, log: str = ""
) -> Lost | None:
    """Return how a training was lost, to its end; None: it was not, or nobody knows.

    Losses and norms of gradients come oldest first; `log` is the name of the log whose lines they
    are from.
    """
    found = _not_finite(losses, "loss", _FEWEST) or _exploded(losses)
    found = found or _not_finite(norms, "gradients", _FEWEST_NORMS)
    return replace(found, log=log) if found is not None else None


def _not_finite(
    points: Sequence[Point], what: Literal["loss", "gradients"], fewest: int
) -> Lost | None:
    count = _at_end(points, lambda value: not math.isfinite(value))
    always = 0 < count == len(points)
    if count < fewest and not (always and what == "loss"):
        return None
    return Lost(what=what, since=points[-count][0], always=always)


def _exploded(points: Sequence[Point]) -> Lost | None:
    """Return a loss that rose by orders of magnitude above its best level and stayed there."""
    finite = [abs(value) for _, value in points if math.isfinite(value)]
    if len(points) < _FEWEST + 1 or not finite:
        return None
    # Medians of blocks, since single losses are small by chance; and how it began, where it
    # exploded at once.
    blocks = [
        statistics.median(finite[start : start + _BLOCK]) for start in range(0, len(finite), _BLOCK)
    ]
    level = min(finite[0], sorted(finite[:5])[min(1, len(finite) - 1)], *blocks)
    limit = _EXPLODED * max(level, _LEAST_LEVEL)
    count = _at_end(points, lambda value: not value < limit)
    if count < max(_FEWEST, len(points) // _SHARE_AT_END):
        return None
    return Lost(what="loss", since=points[-count][0], rose=(level, points[-1][1]))


def find_doubt(points: Sequence[Point], *, log: str = "") -> Lost | None:
    """Return a loss whose last tenth, by its median, lies far above the largest of its first, or
    stays above it.
    """
    points = [(at, value) for at, value in points if math.isfinite(value)]
    if len(points) < _FEWEST + 1:
        return None
    share = max(len(points) // 10, 1)
    blocks = [
        [abs(value) for _, value in points[start : start + share]]
        for start in range(0, len(points), share)
    ]
    first, last = max(blocks[0]), statistics.median(value for _, value in points[-share:])
    quarter = min(value for _, value in points[-max(len(points) // 4, _FEWEST) :])
    stays = quarter > _RISEN * max(min(map(statistics.median, blocks)), _LEAST_RISEN)
    if last < _FAR * max(first, _LEAST_LEVEL) and not (
        stays and last > _RISEN * max(first, _LEAST_RISEN)
    ):
        return None
    return Lost(what="loss", since=points[-share][0], rose=(first, last), exploded=False, log=log)


def _at_end(points: Sequence[Point], is_lost: Callable[[float], bool]) -> int:
    """Return how many of the newest points are lost, without a good one after them."""
    return next(
        (at for at, (_, value) in enumerate(reversed(points)) if not is_lost(value)), len(points)
    )
