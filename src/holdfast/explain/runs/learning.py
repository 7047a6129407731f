"""Whether the recorded loss of a run fell, and how long its steps waited for their loader.

A loss is only judged where a fall means progress: not where several optimizers take turns, as in
a GAN, nor where a policy is trained by reward, nor where the loss goes on changing its sign. Where
the noise hides a fall that would matter, the answer is that nobody knows.

Does not: look for a training that was lost (see ``curves``), or choose the words of a verdict (see
``good_ends``).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.core.errors import HoldfastError
from holdfast.explain.evidence import Learning, LoaderWait
from holdfast.recorder.progress import StepSample, read_samples
from holdfast.recorder.reader import read_steps
from holdfast.recorder.run_files import SAMPLES_FILE

FEWEST_LOSSES = 10
"""Fewer say nothing of a trend."""
_LEAST_FALL = 0.01
"""Share of its level by which a loss must fall. Adam at a learning rate of 1e-6 takes some hundred
steps for it."""
_SURE = 4.0
"""Standard errors by which a fall must exceed its noise; several beginnings are tried, so that it
is not two."""
_LIKELY = 2.0
"""Standard errors from which on a fall is likely, so that the loss is not called flat either."""
_LEFT = 3.0
"""Standard deviations of its noise by which a loss must rise to have left the level at which it
began."""
_SURE_OF_ONE = 6.0
"""The same where the beginning is the first loss alone."""
_MOST_HIDDEN = 0.3
"""Share of its level by which a loss called flat may still have fallen unseen."""
_LOW = 0.1
"""A loss that begins below may be that of a model which has learned already; others begin above."""
_MINORITY = 0.1
"""Share of losses with the rarer sign from which on a stretch is said to have both."""
_SPIKE = 1000.0
"""Rise over the first loss that is worth a word even where the loss came back. A single one may be
one batch."""
_LEAST_LEVEL = 1.0
"""A first loss below counts as this for a spike: one that begins at 0 has no scale of its own."""
_FIRST = 3
_BLOCKS = 8
_FEWEST_OF_A_BLOCK = 4
_NORMAL_DISTANCE = 0.6745 * math.sqrt(6)
"""Median of ``|a - 2 b + c|`` of normal values of standard deviation 1."""
_MEDIAN_ERROR = 1.25
"""Standard error of the median of normal values over that of their mean."""
_RECORDS_OF_A_ROW = 64
"""As ``recorder.history`` keeps them at least."""
_LEAST_STEPS = 10
_LEAST_WAIT_SECONDS = 2.0
"""Waiting below is no matter, whatever its share: a run of seconds starts its workers for half of
its time."""


class Reading(NamedTuple):
    """The loss of one step."""

    step: int
    loss: float
    optimizer: int = 0  # number of the one that stepped, 0 if nobody said


def learning_of_run(curves: Iterable[Sequence[Reading]], *, by_reward: bool = False) -> Learning:
    """Return whether a run learned, from the losses of its processes.

    Args:
        curves: Of each rank, or of each process that trained, the recorded losses, oldest first.
        by_reward: Whether the script imported a package of environments, as reinforcement learning
            does.

    Returns:
        What one of the curves says: ranks see other samples of the same loss, so the surest answer
        counts.
    """
    if by_reward:
        reason = "the loss of a policy that is trained by reward is no measure of it"
        return Learning(outcome="unclear", reason=reason)
    outcomes = [learning_of_process(curve) for curve in curves if curve]
    order = ("spiked", "fell", "flat", "rose", "unclear")
    nothing = Learning(outcome="unclear", reason="no loss was recorded")
    return min(outcomes, key=lambda learning: order.index(learning.outcome), default=nothing)


def learning_of_process(readings: Sequence[Reading]) -> Learning:
    """Return whether the loss of one process fell; of several trainings in a row, the newest."""
    stretches = _by_optimizer(readings)
    if len(stretches) >= 2 * len({stretch[0].optimizer for stretch in stretches}):
        return Learning(outcome="unclear", reason="several optimizers took turns, each with a loss of its own")
    judged = [stretch for stretch in stretches if len(stretch) >= FEWEST_LOSSES]
    newest = judged[-1] if judged else readings
    learning = learning_of(newest)
    if learning.outcome == "flat" and newest[0].step > FEWEST_LOSSES and newest[0] is readings[0]:
        return Learning(
            outcome="unclear",
            reason=f"the losses before step {newest[0].step:,} are not recorded here",
        )
    return learning


def _by_optimizer(readings: Sequence[Reading]) -> list[list[Reading]]:
    """Return the stretches in which the same optimizer stepped."""
    stretches: list[list[Reading]] = []
    for reading in readings:
        if not stretches or stretches[-1][-1].optimizer != reading.optimizer:
            stretches.append([])
        stretches[-1].append(reading)
    return stretches


def learning_of(readings: Sequence[Reading]) -> Learning:
    """Return whether a loss is lower at its end than at its beginning, by more than its noise."""
    finite = [reading for reading in readings if math.isfinite(reading.loss)]
    if len(finite) < FEWEST_LOSSES:
        count = f"only {len(finite)} losses were recorded" if finite else "no loss was recorded"
        return Learning(outcome="unclear", reason=count)
    losses = [reading.loss for reading in finite]
    size = _size_of_end(losses)
    beginning = losses[:size]
    end = losses[-size:]
    last = statistics.median(end)
    if _has_both_signs(beginning) and _has_both_signs(end):
        return Learning(
            outcome="unclear",
            reason="the loss changes its sign all the time, so that it is no measure",
        )
    spike = _spike(finite)
    if spike is not None:
        return spike
    if _rose_first(losses) and losses[0] <= last <= statistics.median(beginning):
        return Learning(outcome="flat", first=losses[0], last=last)
    first = _level_it_fell_from(losses, _SURE)
    if first is not None:
        return Learning(outcome="fell", first=first, last=last)
    first = statistics.median(beginning)
    if _has_both_signs(beginning) or _has_both_signs(end):
        return Learning(
            outcome="unclear",
            reason="the loss changes its sign, and shows no fall beyond its noise",
        )
    if _level_it_fell_from(losses, _LIKELY) is not None:
        return Learning(
            outcome="unclear",
            reason="the loss is lower at its end, but hardly by more than its noise",
        )
    error = math.hypot(_error(beginning), _error(end))
    if _is_fall(last, first, _LIKELY * error):
        return Learning(outcome="rose", first=first, last=last)
    if first - last + _LIKELY * error > _MOST_HIDDEN * max(abs(first), abs(last)):
        return Learning(outcome="unclear", reason="the noise of the loss would hide a fall")
    constant = min(losses) == max(losses)
    if 0 < first < _LOW and not constant:
        reason = f"the loss was low from the beginning: {first:.3g} there, {last:.3g} at the end"
        return Learning(outcome="unclear", reason=reason)
    return Learning(outcome="flat", first=first, last=last, constant=constant)


def _size_of_end(losses: Sequence[float]) -> int:
    """Return how many losses are the end, and at most the beginning: a quarter."""
    return max(len(losses) // 4, _FIRST)


def _rose_first(losses: Sequence[float]) -> bool:
    """Return whether a loss soon rose above where it began, as at too high a learning rate."""
    size = _size_of_end(losses)
    return statistics.median(losses[:size]) - losses[0] > _LEFT * _noise(losses[-size:])


def _level_it_fell_from(losses: Sequence[float], errors: float) -> float | None:
    """Return the level at the beginning that the end lies so many standard errors below; or None.

    A loss can fall within a few steps and then rest, or all the time: the beginning may be the
    first loss alone, the first few, or as much as the first quarter.
    """
    end = losses[-_size_of_end(losses) :]
    last = statistics.median(end)
    noise = max(_noise(end), _noise(losses[:FEWEST_LOSSES]))
    if losses[0] > max(losses[len(losses) // 2 :]) and _is_fall(losses[0], last, _SURE_OF_ONE * noise):
        return losses[0]
    for size in _sizes_of_beginning(losses):
        window = losses[:size]
        level = statistics.median(window)
        # A few values do not tell their own noise.
        error = max(_error(window), _MEDIAN_ERROR * noise / math.sqrt(size))
        if _is_fall(level, last, errors * math.hypot(error, _error(end))):
            return level
    return None


def _sizes_of_beginning(losses: Sequence[float]) -> list[int]:
    """Return how many losses may be the beginning, the fewest first."""
    most = _size_of_end(losses)
    sizes = [_FIRST]
    while 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return [*sizes, most]


def _is_fall(first: float, last: float, noise: float) -> bool:
    """Return whether a level lies below another by more than noise, and by a share that counts."""
    return first - last > noise and first - last >= _LEAST_FALL * max(abs(first), abs(last))


def _noise(losses: Sequence[float]) -> float:
    """Return the standard deviation of the noise of losses: how far each is from the middle of its neighbours.

    A steady rise or fall does not count for it.
    """
    triples = zip(losses, losses[1:], losses[2:], strict=False)
    distances = [abs(before - 2 * loss + after) for before, loss, after in triples]
    return statistics.median(distances) / _NORMAL_DISTANCE if distances else 0.0


def _error(losses: Sequence[float]) -> float:
    """Return the standard error of the median of losses.

    Where they are many, also from how far the medians of blocks lie apart: only there slow noise
    shows.
    """
    error = _MEDIAN_ERROR * _noise(losses) / math.sqrt(len(losses))
    size = len(losses) // _BLOCKS
    if size < _FEWEST_OF_A_BLOCK:
        return error
    blocks = [statistics.median(losses[number * size : (number + 1) * size]) for number in range(_BLOCKS)]
    return max(error, statistics.stdev(blocks) / math.sqrt(_BLOCKS))


def _has_both_signs(losses: Sequence[float]) -> bool:
    negative = sum(loss < 0 for loss in losses)
    return min(negative, len(losses) - negative) >= _MINORITY * len(losses)


def _spike(readings: Sequence[Reading]) -> Learning | None:
    """Return that the loss rose a thousandfold for more than one batch; None: it did not."""
    level = max(abs(readings[0].loss), _LEAST_LEVEL)
    limit = _SPIKE * level
    for before, after in itertools.pairwise(readings):
        if min(before.loss, after.loss) > limit:
            peak = max(reading.loss for reading in readings)
            return Learning(outcome="spiked", first=readings[0].loss, last=peak, step=before.step)
    return None


def readings_of_process(folder: Path) -> list[Reading]:
    """Return the losses that were recorded of a process, oldest first; none if they cannot be read.

    Steps that its ring does not hold any more are there as the means of their rows, and then those
    of the ring are means of as many, so that both are as noisy.
    """
    readings = _readings((sample.step, sample.loss, sample.optimizer) for sample in samples_of(folder))
    history = folder / f"{SAMPLES_FILE}.history"
    if not history.exists():
        return readings
    from holdfast.recorder.history import (
        NAMES,
        read_history,
    )  # here: numpy takes a tenth of a second

    loss = NAMES.index("loss")
    first = readings[0].step if readings else math.inf
    old = [
        Reading(step=int(row["step"]), loss=float(row["mean"][loss]), optimizer=int(row["optimizer"]))
        for row in read_history(folder / SAMPLES_FILE).rows
        if row["finite"][loss] and row["step"] < first
    ]
    return [*old, *_means(readings)]


def _means(readings: Sequence[Reading]) -> list[Reading]:
    """Return the mean of each stretch of readings, as long as a row of the history."""
    means: list[Reading] = []
    for optimizer in dict.fromkeys(reading.optimizer for reading in readings):
        own = [reading for reading in readings if reading.optimizer == optimizer]
        stretches = [own[start : start + _RECORDS_OF_A_ROW] for start in range(0, len(own), _RECORDS_OF_A_ROW)]
        means += [
            stretch[0]._replace(loss=statistics.fmean(reading.loss for reading in stretch)) for stretch in stretches
        ]
    return sorted(means, key=lambda reading: reading.step)


def readings_of_guard(folder: Path, until: float) -> list[Reading]:
    """Return the losses of the steps that a Guard committed before a Unix time, oldest first."""
    try:
        marks = [mark for mark in read_steps(folder) if mark.unix_seconds < until]
    except (HoldfastError, OSError, ValueError):
        return []
    return _readings((mark.global_step, mark.loss, mark.optimizer) for mark in marks)


def _readings(steps: Iterable[tuple[int, float | None, int]]) -> list[Reading]:
    return [Reading(step, loss, optimizer) for step, loss, optimizer in steps if loss is not None]


def samples_of(folder: Path) -> list[StepSample]:
    """Return the samples of a process; none where there are none, or damaged ones."""
    try:
        return read_samples(folder / SAMPLES_FILE) if (folder / SAMPLES_FILE).exists() else []
    except (HoldfastError, OSError, ValueError):
        return []


def loader_wait_of_run(folders: Iterable[Path]) -> LoaderWait | None:
    """Return how long steps waited for their loaders, without the first; None: that is no matter."""
    timed = [
        sample
        for folder in folders
        for sample in samples_of(folder)[1:]
        if sample.seconds > 0 and sample.wait_seconds >= 0
    ]
    waited = math.fsum(min(sample.wait_seconds, sample.seconds) for sample in timed)
    if len(timed) < _LEAST_STEPS or waited < _LEAST_WAIT_SECONDS:
        return None
    seconds = math.fsum(sample.seconds for sample in timed)
    return LoaderWait(share=waited / seconds, seconds=waited, steps=len(timed))
