"""Judge whether the recorded loss of a run fell, and how long its steps waited for their loader.

A loss is only judged if a fall means progress. It does not if several optimizers take turns, as in
a GAN, if a policy is trained by reward, or if the loss keeps changing its sign. If the noise could
hide a fall that matters, the outcome is "unclear".

A loss that diverged is found in ``curves``, and the verdict is put into words in
``explain.causes.good_ends``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from holdfast.core.errors import HoldfastError
from holdfast.explain.evidence import Learning, LoaderWait
from holdfast.recorder.progress import StepSample, read_samples
from holdfast.recorder.reader import read_steps
from holdfast.recorder.run_files import SAMPLES_FILE

# Fewer losses show no trend.
FEWEST_LOSSES = 10
# A loss must fall by this share of its level. Adam with a learning rate of 1e-6 takes a few hundred
# steps to do so.
_LEAST_FALL = 0.01
# A certain fall exceeds this many standard errors; 2 would be too few, because several beginnings
# are tried.
_SURE = 4.0
# A loss that fell by more than this many standard errors is not called flat.
_LIKELY = 2.0
# A rise within the first quarter is clear if it exceeds this many standard deviations of the noise.
_CLEAR_RISE = 3.0
# A fall measured from the first loss alone must exceed this many standard deviations of the noise.
_SURE_FROM_ONE_LOSS = 6.0
# A loss is only called flat if its noise could not hide a fall by this share of its level.
_MOST_HIDDEN = 0.3
# A loss that begins below this value may be that of a trained model.
_LOW = 0.1
# Losses have both signs if at least this share of them has the rarer sign.
_MINORITY = 0.1
# A rise to this multiple of the first loss is reported even if the loss came back, unless it was a
# single batch.
_SPIKE = 1000.0
# A first loss below this value counts as this value for a spike, since a loss that begins at 0 has
# no scale.
_LEAST_LEVEL = 1.0
# The beginning and the end consist of at least this many losses.
_FIRST = 3
# Slow noise is measured between the medians of this many blocks, if each has enough losses.
_BLOCKS = 8
_FEWEST_OF_A_BLOCK = 4
# The median of ``|a - 2 b + c|`` of normal values of standard deviation 1.
_NORMAL_DISTANCE = 0.6745 * math.sqrt(6)
# The standard error of the median of normal values, as a multiple of that of their mean.
_MEDIAN_ERROR = 1.25
# The least number of records in a row of ``recorder.history``.
_RECORDS_OF_A_ROW = 64
# Waiting for the loader is judged only after this many steps and this much waiting in total: a run
# of a few seconds spends half of its time starting workers.
_LEAST_STEPS = 10
_LEAST_WAIT_SECONDS = 2.0


# If ranks differ, the outcome that comes first here is reported.
_BY_CERTAINTY = ("spiked", "fell", "flat", "rose", "unclear")


class Reading(NamedTuple):
    """The loss of one step."""

    step: int
    loss: float
    # The number of the optimizer that stepped, or 0 if it was not recorded.
    optimizer: int = 0


def learning_of_run(curves: Iterable[Sequence[Reading]], *, by_reward: bool = False) -> Learning:
    """Return whether a run learned, from the losses of its processes.

    Args:
        curves: The recorded losses of each rank, or of each process that trained, oldest first.
        by_reward: Whether the script imported a reinforcement-learning environment package.

    Returns:
        The most certain outcome over all curves, since ranks compute the same loss on different
            samples.
    """
    if by_reward:
        reason = "the loss of a policy that is trained by reward does not measure its progress"
        return Learning(outcome="unclear", reason=reason)
    return min(
        (learning_of_process(curve) for curve in curves if curve),
        key=lambda learning: _BY_CERTAINTY.index(learning.outcome),
        default=Learning(outcome="unclear", reason="no loss was recorded"),
    )


def learning_of_process(readings: Sequence[Reading]) -> Learning:
    """Return whether the loss of one process fell.

    If it trained several models one after another, the last one counts.
    """
    stretches = _by_optimizer(readings)
    optimizers = {stretch[0].optimizer for stretch in stretches}
    if len(stretches) >= 2 * len(optimizers):
        reason = "several optimizers took turns, each with its own loss"
        return Learning(outcome="unclear", reason=reason)
    long_enough = [stretch for stretch in stretches if len(stretch) >= FEWEST_LOSSES]
    newest = long_enough[-1] if long_enough else readings
    learning = learning_of(newest)
    first = newest[0]
    begins_late = first is readings[0] and first.step > FEWEST_LOSSES
    if learning.outcome == "flat" and begins_late:
        reason = f"the losses before step {first.step:,} are not recorded here"
        return Learning(outcome="unclear", reason=reason)
    return learning


def _by_optimizer(readings: Sequence[Reading]) -> list[list[Reading]]:
    """Split the readings into stretches with the same optimizer."""
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
        reason = f"only {len(finite)} losses were recorded" if finite else "no loss was recorded"
        return Learning(outcome="unclear", reason=reason)
    curve = _Curve(finite)
    for rule in _RULES:
        learning = rule(curve)
        if learning is not None:
            return learning
    return curve.learning("flat", constant=min(curve.losses) == max(curve.losses))


class _Curve:
    """The finite losses of a run, and their levels at the beginning and at the end."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.readings = readings
        self.losses = [reading.loss for reading in readings]
        # The first and the last quarter, with at least three losses each.
        size = _size_of_end(self.losses)
        self.beginning = self.losses[:size]
        self.end = self.losses[-size:]
        # Their medians.
        self.first = statistics.median(self.beginning)
        self.last = statistics.median(self.end)

    def learning(
        self,
        outcome: Literal["fell", "flat", "rose"],
        *,
        first: float | None = None,
        constant: bool = False,
    ) -> Learning:
        """Return an outcome with the levels at both ends.

        Args:
            outcome: Whether the loss fell.
            first: The level at the beginning; by default that of the first quarter.
            constant: Whether the loss never changed.
        """
        level = self.first if first is None else first
        return Learning(outcome=outcome, first=level, last=self.last, constant=constant)


def _changes_sign_all_the_time(curve: _Curve) -> Learning | None:
    """A loss with both signs at both ends, such as that of a critic, does not measure progress."""
    if _has_both_signs(curve.beginning) and _has_both_signs(curve.end):
        reason = "the loss keeps changing sign, so it does not measure progress"
        return Learning(outcome="unclear", reason=reason)
    return None


def _spiked(curve: _Curve) -> Learning | None:
    """Two consecutive losses far above the first are reported even if the loss recovered."""
    limit = _SPIKE * max(abs(curve.losses[0]), _LEAST_LEVEL)
    for before, after in itertools.pairwise(curve.readings):
        if min(before.loss, after.loss) > limit:
            return Learning(
                outcome="spiked",
                first=curve.losses[0],
                last=max(curve.losses),
                step=before.step,
            )
    return None


def _only_came_back_down(curve: _Curve) -> Learning | None:
    """A loss that soon rose and then fell, but not below its first value, has not fallen."""
    first = curve.losses[0]
    if _rose_first(curve.losses) and first <= curve.last <= curve.first:
        return curve.learning("flat", first=first)
    return None


def _fell(curve: _Curve) -> Learning | None:
    """A fall that clearly exceeds the noise is progress."""
    first = _level_it_fell_from(curve.losses, _SURE)
    return None if first is None else curve.learning("fell", first=first)


def _changes_sign(curve: _Curve) -> Learning | None:
    """A loss with both signs is only called flat or rising if it has them at neither end."""
    if _has_both_signs(curve.beginning) or _has_both_signs(curve.end):
        reason = "the loss changes sign and does not fall by more than its noise"
        return Learning(outcome="unclear", reason=reason)
    return None


def _fell_by_little_more_than_noise(curve: _Curve) -> Learning | None:
    """A fall that noise could nearly explain is neither certain nor clearly absent."""
    if _level_it_fell_from(curve.losses, _LIKELY) is not None:
        reason = "the loss is lower at the end, but by little more than its noise"
        return Learning(outcome="unclear", reason=reason)
    return None


def _rose(curve: _Curve) -> Learning | None:
    """A rise needs less certainty than a fall, since it only says that the loss did not fall."""
    is_rise = _is_fall(curve.last, curve.first, _LIKELY * _error_of_fall(curve))
    return curve.learning("rose") if is_rise else None


def _noise_would_hide_a_fall(curve: _Curve) -> Learning | None:
    """A loss is only called flat if a fall that matters would show in it."""
    largest_fall = curve.first - curve.last + _LIKELY * _error_of_fall(curve)
    if largest_fall > _MOST_HIDDEN * max(abs(curve.first), abs(curve.last)):
        return Learning(outcome="unclear", reason="the loss is too noisy to show a fall")
    return None


def _was_low_from_the_beginning(curve: _Curve) -> Learning | None:
    """A low loss that still varies may belong to an already trained model."""
    is_constant = min(curve.losses) == max(curve.losses)
    if 0 < curve.first < _LOW and not is_constant:
        reason = (
            f"the loss was low from the beginning: {curve.first:.3g} there, {curve.last:.3g} at"
            " the end"
        )
        return Learning(outcome="unclear", reason=reason)
    return None


# The first rule that has an answer wins. If none has one, the loss is flat.
_RULES: tuple[Callable[[_Curve], Learning | None], ...] = (
    _changes_sign_all_the_time,
    _spiked,
    _only_came_back_down,
    _fell,
    _changes_sign,
    _fell_by_little_more_than_noise,
    _rose,
    _noise_would_hide_a_fall,
    _was_low_from_the_beginning,
)


def _error_of_fall(curve: _Curve) -> float:
    """Return the standard error of the difference between the levels of the two quarters."""
    return math.hypot(_error(curve.beginning), _error(curve.end))


def _size_of_end(losses: Sequence[float]) -> int:
    """Return how many losses form the end of a curve: a quarter, and at least `_FIRST`."""
    return max(len(losses) // 4, _FIRST)


def _rose_first(losses: Sequence[float]) -> bool:
    """Return whether a loss clearly rose within its first quarter.

    That happens if the learning rate is too high.
    """
    size = _size_of_end(losses)
    return statistics.median(losses[:size]) - losses[0] > _CLEAR_RISE * _noise(losses[-size:])


def _level_it_fell_from(losses: Sequence[float], errors: float) -> float | None:
    """Return the level at the beginning from which the loss fell, or None if it did not.

    Some losses fall within a few steps and then stay flat; others keep falling. So several
    beginnings are tried, from the first loss alone up to the first quarter, and the first one that
    shows a fall counts.

    Args:
        losses: The losses, oldest first.
        errors: How many standard errors the end must lie below the beginning.
    """
    end = losses[-_size_of_end(losses) :]
    last = statistics.median(end)
    noise = max(_noise(end), _noise(losses[:FEWEST_LOSSES]))
    if losses[0] > max(losses[len(losses) // 2 :]) and _is_fall(
        losses[0], last, _SURE_FROM_ONE_LOSS * noise
    ):
        return losses[0]
    for size in _sizes_of_beginning(losses):
        window = losses[:size]
        level = statistics.median(window)
        # A few values may underestimate their own noise.
        error = max(_error(window), _MEDIAN_ERROR * noise / math.sqrt(size))
        if _is_fall(level, last, errors * math.hypot(error, _error(end))):
            return level
    return None


def _sizes_of_beginning(losses: Sequence[float]) -> list[int]:
    """Return the window sizes to try for the beginning, in ascending order."""
    most = _size_of_end(losses)
    sizes = [_FIRST]
    while 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return [*sizes, most]


def _is_fall(first: float, last: float, noise: float) -> bool:
    """Return whether a level fell by more than the noise and by at least `_LEAST_FALL`."""
    return first - last > noise and first - last >= _LEAST_FALL * max(abs(first), abs(last))


def _noise(losses: Sequence[float]) -> float:
    """Return the standard deviation of the noise of losses.

    It is estimated from each loss's distance to the mean of its neighbours, which a steady rise or
    fall does not affect.
    """
    triples = zip(losses, losses[1:], losses[2:], strict=False)
    distances = [abs(before - 2 * loss + after) for before, loss, after in triples]
    return statistics.median(distances) / _NORMAL_DISTANCE if distances else 0.0


def _error(losses: Sequence[float]) -> float:
    """Return the standard error of the median of losses.

    With enough losses, the spread of block medians is a lower bound, which accounts for slow noise.
    """
    error = _MEDIAN_ERROR * _noise(losses) / math.sqrt(len(losses))
    size = len(losses) // _BLOCKS
    if size < _FEWEST_OF_A_BLOCK:
        return error
    blocks = [
        statistics.median(losses[number * size : (number + 1) * size]) for number in range(_BLOCKS)
    ]
    return max(error, statistics.stdev(blocks) / math.sqrt(_BLOCKS))


def _has_both_signs(losses: Sequence[float]) -> bool:
    negative = sum(loss < 0 for loss in losses)
    return min(negative, len(losses) - negative) >= _MINORITY * len(losses)


def readings_of_process(folder: Path) -> list[Reading]:
    """Return the recorded losses of a process, oldest first; none if they cannot be read.

    The ring of samples holds the newest steps; older ones are kept only as means over many steps.
    If there are any, the newest steps are averaged in the same way, so that both are equally noisy.
    """
    readings = _readings(
        (sample.step, sample.loss, sample.optimizer) for sample in samples_of(folder)
    )
    history = folder / f"{SAMPLES_FILE}.history"
    if not history.exists():
        return readings
    # Imported here, because it imports numpy, which takes a tenth of a second.
    from holdfast.recorder.history import NAMES, read_history

    loss_column = NAMES.index("loss")
    first_step = readings[0].step if readings else math.inf
    older = [
        Reading(
            step=int(row["step"]),
            loss=float(row["mean"][loss_column]),
            optimizer=int(row["optimizer"]),
        )
        for row in read_history(folder / SAMPLES_FILE).rows
        if row["finite"][loss_column] and row["step"] < first_step
    ]
    return [*older, *_means(readings)]


def _means(readings: Sequence[Reading]) -> list[Reading]:
    """Average readings over stretches as long as a row of the history."""
    means: list[Reading] = []
    for optimizer in dict.fromkeys(reading.optimizer for reading in readings):
        own = [reading for reading in readings if reading.optimizer == optimizer]
        stretches = [
            own[start : start + _RECORDS_OF_A_ROW]
            for start in range(0, len(own), _RECORDS_OF_A_ROW)
        ]
        means += [
            stretch[0]._replace(loss=statistics.fmean(reading.loss for reading in stretch))
            for stretch in stretches
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
    """Return the samples of a process; none if they are missing or damaged."""
    try:
        return read_samples(folder / SAMPLES_FILE) if (folder / SAMPLES_FILE).exists() else []
    except (HoldfastError, OSError, ValueError):
        return []


def loader_wait_of_run(folders: Iterable[Path]) -> LoaderWait | None:
    """Return how long steps waited for their loader; None if negligible.

    The first step of each process is ignored, because the loader starts during it.
    """
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
