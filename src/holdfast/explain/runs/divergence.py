"""Detect losses that are no longer finite or rose by orders of magnitude above their best level.

``explain.causes.ends`` decides how a divergence affects the verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from holdfast.explain.evidence import Divergence
from holdfast.explain.logs.log_text import LogText
from holdfast.explain.runs.recorded_steps import read_guard_steps, read_process_samples
from holdfast.recorder.run_files import ProcessInfo

# A step number, or a line number in a log, and the loss or gradient norm that was recorded there.
Point = tuple[int, float]

# A loss has diverged if at least this many of its last values are bad and earlier values were good.
# A single bad loss may come from a batch that was skipped.
_MIN_BAD_LOSSES = 2
# Gradient norms have diverged if at least this many of the last norms are bad. While a loss scaler
# searches for its scale, some of the first norms are infinite.
_MIN_BAD_NORMS = 3
# A loss that rose by this factor above its best level has exploded. The factor is larger than
# manual loss scales, which reach 2**16, and unscaled rewards, which reach 1e4.
_EXPLOSION_FACTOR = 1e6
# An exploded loss must have stayed high for the last of this many equal parts of the run.
_PARTS_OF_RUN = 20
# The best level is the lowest median over blocks of this many losses, because a single loss may be
# small by chance.
_LOSSES_PER_BLOCK = 10
# The level at the beginning is computed from this many losses.
_FIRST_LOSSES = 5
# A level below this value is replaced with this value, because a loss that begins near 0 provides
# no scale.
_MIN_LEVEL = 1.0
# A rise by this factor from the first to the last losses is reported. Single losses of healthy runs
# can rise by a factor of 40.
_FAR_RISE_FACTOR = 100.0
# If the loss also stays high, a rise by this smaller factor is reported, and levels below
# `_MIN_RISEN_LEVEL` are replaced with that value. The losses of 91 healthy programs rose at most by
# a factor of 2.
_STAYING_RISE_FACTOR = 10.0
_MIN_RISEN_LEVEL = 0.1


def find_recorded_divergence(
    folders: Iterable[tuple[Path, ProcessInfo]],
    guards: Iterable[Path],
    *,
    began: float = 0.0,
    until: float = math.inf,
) -> tuple[Divergence | None, bool]:
    """Return how a run's training diverged, according to its recorded steps.

    Args:
        folders: The folder and the `ProcessInfo` of each training process. Only the newest process
            of each rank is read; older processes are from an earlier launch or training run.
        guards: The folders to which Guards recorded. Their rings contain the steps of all attempts.
        began: A Unix time. Steps that Guards recorded before this time are ignored.
        until: A Unix time. Steps that Guards recorded at this time or later are ignored.

    Returns:
        How the training diverged, or None if it did not, and whether any loss was recorded. If
        several losses diverged, the loss that exploded first is returned. If no loss exploded, the
        first loss that ended far above its beginning is returned.
    """
    curves = [
        *map(_read_curves_of_process, _newest_folders(folders)),
        *(_read_curves_of_guard(folder, began=began, until=until) for folder in guards),
    ]
    divergences = []
    for losses, norms in curves:
        divergence = find_divergence(losses, norms) or find_risen_loss(losses)
        if divergence is not None:
            divergences.append(divergence)
    first = min(divergences, key=lambda other: (not other.exploded, other.since), default=None)
    return first, any(curve.losses for curve in curves)


class _Curves(NamedTuple):
    """The recorded losses and gradient norms of one process or Guard, oldest first."""

    losses: list[Point]
    norms: list[Point]


def _newest_folders(folders: Iterable[tuple[Path, ProcessInfo]]) -> list[Path]:
    """Return the folder of the newest training process of each rank."""
    newest: dict[int | None, Path] = {}
    for folder, info in sorted(folders, key=lambda pair: pair[1].started):
        newest[info.rank] = folder
    return list(newest.values())


def _read_curves_of_process(folder: Path) -> _Curves:
    samples = read_process_samples(folder)
    return _Curves(
        losses=[(sample.step, sample.loss) for sample in samples if sample.loss is not None],
        norms=[
            (sample.step, sample.grad_norm) for sample in samples if sample.grad_norm is not None
        ],
    )


def _read_curves_of_guard(folder: Path, *, began: float, until: float) -> _Curves:
    steps = read_guard_steps(folder, began=began, until=until)
    return _Curves(
        losses=[(step.global_step, step.loss) for step in steps if step.loss is not None],
        norms=[(step.global_step, step.grad_norm) for step in steps if step.grad_norm is not None],
    )


def find_printed_divergence(log: LogText, *, name: str) -> Divergence | None:
    """Return how a training run diverged, according to its log, or None if it did not diverge.

    Args:
        log: The log, with the losses and gradient norms that were printed.
        name: The name of the log, which `Divergence.clause` mentions.
    """
    return find_divergence(log.losses, log.norms, log=name) or find_risen_loss(log.losses, log=name)


def find_nan_at_end(log: LogText, *, name: str) -> Divergence | None:
    """Return the newest loss of a log if it is NaN, or None.

    An infinite loss does not count: scripts begin with a best loss that is infinite.

    Args:
        log: The log, with the losses that were printed.
        name: The name of the log, which `Divergence.clause` mentions.
    """
    if not log.losses or not math.isnan(log.losses[-1][1]):
        return None
    return Divergence(quantity="loss", since=log.losses[-1][0], log=name)


def find_divergence(
    losses: Sequence[Point], norms: Sequence[Point] = (), *, log: str = ""
) -> Divergence | None:
    """Return how a training run diverged without recovering, or None if it did not diverge.

    Args:
        losses: The losses, oldest first.
        norms: The gradient norms, oldest first.
        log: The name of the log that contains the values; empty for recorded steps.
    """
    divergence = (
        _find_nonfinite_end(losses, "loss", _MIN_BAD_LOSSES)
        or _find_explosion(losses)
        or _find_nonfinite_end(norms, "gradients", _MIN_BAD_NORMS)
    )
    return replace(divergence, log=log) if divergence is not None else None


def _find_nonfinite_end(
    points: Sequence[Point], quantity: Literal["loss", "gradients"], min_count: int
) -> Divergence | None:
    """Return the divergence if at least the last `min_count` values are not finite, or else None.

    A loss that was never finite has diverged even if there are fewer than `min_count` values.

    Args:
        points: The losses or gradient norms, oldest first.
        quantity: Whether the values are losses or gradient norms.
        min_count: How many values at the end must not be finite.
    """
    count = _count_bad_at_end(points, lambda value: not math.isfinite(value))
    always = 0 < count == len(points)
    if count < min_count and not (always and quantity == "loss"):
        return None
    return Divergence(quantity=quantity, since=points[-count][0], always=always)


def _find_explosion(points: Sequence[Point]) -> Divergence | None:
    """Return the divergence if the loss rose far above its best level and stayed high, or None."""
    finite = [abs(value) for _, value in points if math.isfinite(value)]
    if len(points) <= _MIN_BAD_LOSSES or not finite:
        return None
    level = _find_best_level(finite)
    limit = _EXPLOSION_FACTOR * max(level, _MIN_LEVEL)
    # The negated comparison also counts NaN as a value above the limit.
    count = _count_bad_at_end(points, lambda value: not value < limit)
    if count < max(_MIN_BAD_LOSSES, len(points) // _PARTS_OF_RUN):
        return None
    return Divergence(quantity="loss", since=points[-count][0], rose=(level, points[-1][1]))


def _find_best_level(losses: Sequence[float]) -> float:
    """Return the lowest level of a loss: the lowest median of any block of losses.

    Because a loss may explode immediately, the first loss and the second-smallest of the first few
    losses are also considered levels.
    """
    # The smallest of the first losses if there is only one.
    second_smallest = sorted(losses[:_FIRST_LOSSES])[:2][-1]
    medians = [
        statistics.median(losses[start : start + _LOSSES_PER_BLOCK])
        for start in range(0, len(losses), _LOSSES_PER_BLOCK)
    ]
    return min(losses[0], second_smallest, *medians)


def find_risen_loss(points: Sequence[Point], *, log: str = "") -> Divergence | None:
    """Return the divergence if the loss ended far above its first values, or None.

    Such a rise may be intended. A loss has risen in two cases:

    - The median of the last tenth is at least 100 times the largest loss of the first tenth.
    - The median of the last tenth is more than 10 times the largest loss of the first tenth, and
      every loss in the last quarter is more than 10 times the median of the best tenth.

    Args:
        points: The losses, oldest first.
        log: The name of the log that contains the values; empty for recorded steps.
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
    is_far_above = last >= _FAR_RISE_FACTOR * max(first, _MIN_LEVEL)
    is_above = last > _STAYING_RISE_FACTOR * max(first, _MIN_RISEN_LEVEL)
    stays_above = lowest_of_last_quarter > _STAYING_RISE_FACTOR * max(best, _MIN_RISEN_LEVEL)
    if not is_far_above and not (is_above and stays_above):
        return None
    return Divergence(
        quantity="loss", since=finite[-size][0], rose=(first, last), exploded=False, log=log
    )


def _count_bad_at_end(points: Sequence[Point], is_bad: Callable[[float], bool]) -> int:
    """Return the number of bad points after the last good point."""
    count = 0
    for _, value in reversed(points):
        if not is_bad(value):
            break
        count += 1
    return count
