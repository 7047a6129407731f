"""Detect losses that diverged: not finite, or many orders of magnitude above their best level.

What that means for the verdict is decided in ``explain.causes.ends``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from holdfast.explain.evidence import LostTraining
from holdfast.explain.logs.text import LogText
from holdfast.explain.runs.recorded_steps import samples_of_process, steps_of_guard
from holdfast.recorder.run_files import ProcessInfo

# A step number, or a line number in a log, and a value.
Point = tuple[int, float]

# At least this many bad losses at the end, if there were good ones before. A single bad loss may be
# a batch that was skipped.
_MIN_BAD_LOSSES = 2
# The same for gradient norms. While a loss scaler searches for its scale, some of the first norms
# are infinite.
_MIN_BAD_NORMS = 3
# A loss that rose by this factor above its best level has exploded. Manual loss scales reach 2**16,
# and unscaled rewards 1e4.
_EXPLODED = 1e6
# An exploded loss must have stayed high for at least one twentieth of the run.
_SHARE_AT_END = 20
# The best level is the lowest median of blocks of this many losses, since single losses are small
# by chance.
_BLOCK = 10
# How many losses determine the level at the beginning.
_BEGINNING = 5
# A loss counts as at least this level: a loss that begins at 0 has no scale of its own.
_MIN_LEVEL = 1.0
# A rise from the first to the last losses that is worth mentioning. Single losses of healthy runs
# rise 40-fold.
_FAR = 100.0
# The same for a loss that stays high, and the level that smaller losses are raised to. The losses
# of 91 healthy programs rose at most 2-fold.
_RISEN = 10.0
_MIN_RISEN_LEVEL = 0.1


def find_lost_training(
    folders: Iterable[tuple[Path, ProcessInfo]],
    guards: Iterable[Path],
    *,
    began: float = 0.0,
    until: float = math.inf,
) -> tuple[LostTraining | None, bool]:
    """Return how the training of a run diverged, and whether any loss was recorded.

    Args:
        folders: The processes that trained. For each rank only the newest counts; older ones belong
            to an earlier launch or an earlier training run.
        guards: The folders of guards. Their rings hold all attempts.
        began: The Unix time from which on steps of guards count.
        until: The Unix time up to which they count.

    Returns:
        The loss that exploded first, or else the first doubtful one, or None; and whether any loss
        was recorded.
    """
    newest: dict[int | None, Path] = {}
    for folder, info in sorted(folders, key=lambda pair: pair[1].started):
        newest[info.rank] = folder
    # By process or Guard: the number, the loss and the gradient norm of each step.
    recorded: list[list[tuple[int, float | None, float | None]]] = []
    for folder in newest.values():
        samples = samples_of_process(folder)
        recorded.append([(sample.step, sample.loss, sample.grad_norm) for sample in samples])
    for folder in guards:
        steps = steps_of_guard(folder, began=began, until=until)
        recorded.append([(step.global_step, step.loss, step.grad_norm) for step in steps])

    any_loss = False
    candidates = []
    for steps_of_one in recorded:
        losses = [(step, loss) for step, loss, _ in steps_of_one if loss is not None]
        norms = [(step, norm) for step, _, norm in steps_of_one if norm is not None]
        any_loss = any_loss or bool(losses)
        lost = find_lost(losses, norms) or find_risen_loss(losses)
        if lost is not None:
            candidates.append(lost)
    first = min(candidates, key=lambda lost: (not lost.exploded, lost.since), default=None)
    return first, any_loss


def lost_from_output(log: LogText, *, name: str) -> LostTraining | None:
    """Return how a training run diverged or ended far above its start, judged by its log.

    Args:
        log: The log.
        name: The name of the log for sentences.
    """
    return find_lost(log.losses, log.norms, log=name) or find_risen_loss(log.losses, log=name)


def find_lost(
    losses: Sequence[Point], norms: Sequence[Point] = (), *, log: str = ""
) -> LostTraining | None:
    """Return how a training run diverged without recovering, or None if it did not.

    Args:
        losses: The losses, oldest first.
        norms: The norms of the gradients, oldest first.
        log: The name of the log that the values come from; empty for recorded steps.
    """
    lost = (
        _not_finite(losses, "loss", _MIN_BAD_LOSSES)
        or _exploded(losses)
        or _not_finite(norms, "gradients", _MIN_BAD_NORMS)
    )
    return replace(lost, log=log) if lost is not None else None


def _not_finite(
    points: Sequence[Point], what: Literal["loss", "gradients"], fewest: int
) -> LostTraining | None:
    """Return the divergence if at least `fewest` values at the end are not finite.

    A loss that was never finite counts however short it is.
    """
    count = _count_at_end(points, lambda value: not math.isfinite(value))
    always = 0 < count == len(points)
    if count < fewest and not (always and what == "loss"):
        return None
    return LostTraining(what=what, since=points[-count][0], always=always)


def _exploded(points: Sequence[Point]) -> LostTraining | None:
    """Return the divergence if the loss rose far above its best level and stayed there."""
    finite = [abs(value) for _, value in points if math.isfinite(value)]
    if len(points) <= _MIN_BAD_LOSSES or not finite:
        return None
    level = _best_level(finite)
    limit = _EXPLODED * max(level, _MIN_LEVEL)
    # NaN counts as above the limit.
    count = _count_at_end(points, lambda value: not value < limit)
    if count < max(_MIN_BAD_LOSSES, len(points) // _SHARE_AT_END):
        return None
    return LostTraining(what="loss", since=points[-count][0], rose=(level, points[-1][1]))


def _best_level(losses: Sequence[float]) -> float:
    """Return the lowest level that a loss had, at its beginning or in any block.

    The beginning counts with its first and its second smallest value, because a loss may explode
    immediately.
    """
    second_smallest = sorted(losses[:_BEGINNING])[:2][-1]
    medians = [
        statistics.median(losses[start : start + _BLOCK]) for start in range(0, len(losses), _BLOCK)
    ]
    return min(losses[0], second_smallest, *medians)


def find_risen_loss(points: Sequence[Point], *, log: str = "") -> LostTraining | None:
    """Return a loss that ended far above its beginning, which need not be a failure, or None.

    The median of its last tenth lies a hundredfold above the largest loss of its first tenth; or
    tenfold, and the last quarter stays tenfold above the best tenth.

    Args:
        points: The losses, oldest first.
        log: The name of the log that the values come from; empty for recorded steps.
    """
    finite = [(at, value) for at, value in points if math.isfinite(value)]
    if len(finite) <= _MIN_BAD_LOSSES:
        return None
    values = [value for _, value in finite]
    size = max(len(values) // 10, 1)
    tenths = [
        [abs(value) for value in values[start : start + size]]
        for start in range(0, len(values), size)
    ]
    first = max(tenths[0])
    last = statistics.median(values[-size:])
    best = min(statistics.median(tenth) for tenth in tenths)
    lowest_of_last_quarter = min(values[-max(len(values) // 4, _MIN_BAD_LOSSES) :])
    is_far_above = last >= _FAR * max(first, _MIN_LEVEL)
    stays_above = last > _RISEN * max(
        first, _MIN_RISEN_LEVEL
    ) and lowest_of_last_quarter > _RISEN * max(best, _MIN_RISEN_LEVEL)
    if not is_far_above and not stays_above:
        return None
    return LostTraining(
        what="loss", since=finite[-size][0], rose=(first, last), exploded=False, log=log
    )


def _count_at_end(points: Sequence[Point], is_lost: Callable[[float], bool]) -> int:
    """Return how many points at the end are bad, up to the last good one."""
    count = 0
    for _, value in reversed(points):
        if not is_lost(value):
            break
        count += 1
    return count
