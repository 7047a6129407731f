"""Judge whether a run's loss fell.

A falling loss does not always indicate progress, for example if several optimizers take turns (as
in a GAN), if a policy is trained by reward, or if the loss keeps changing sign. In these cases, the
outcome is "unclear". It is also "unclear" if the noise could hide a meaningful fall.

``divergence`` finds losses that diverged. ``explain.causes.good_ends`` reports the outcome in the
verdict.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from holdfast.explain.evidence import Learning
from holdfast.explain.logs.log_text import LogText
from holdfast.explain.runs.recorded_steps import LossReading

# At least this many losses are needed to show a trend.
MIN_LOSSES = 10
# A loss has fallen only if it fell by at least this fraction of its level. With Adam at a learning
# rate of 1e-6, such a fall takes a few hundred steps.
_MIN_FALL_SHARE = 0.01
# A fall is certain if it exceeds this many standard errors. Two standard errors would not be
# enough, because the level at the beginning is measured over several windows.
_SURE_ERRORS = 4.0
# A loss that fell by more than this many standard errors is not called flat.
_LIKELY_ERRORS = 2.0
# An early rise, from the first loss to the level of the first quarter, is clear if it exceeds this
# many standard deviations of the noise.
_CLEAR_RISE_DEVIATIONS = 3.0
# A fall measured from the first loss alone must exceed this many standard deviations of the noise.
_SURE_DEVIATIONS_FROM_ONE_LOSS = 6.0
# A loss is not called flat if its noise could hide a fall by this fraction of its level.
_MAX_HIDDEN_FALL_SHARE = 0.3
# If the level of the first losses is below this value, the model may have been pretrained.
_LOW_LEVEL = 0.1
# A series of losses has both signs if at least this fraction of the losses has the rarer sign.
_MIN_SHARE_OF_RARER_SIGN = 0.1
# A rise to this multiple of the first loss is a spike. It is reported even if the loss recovered,
# unless it affected only a single batch.
_SPIKE_FACTOR = 1000.0
# To find a spike, a first loss below this value is replaced with this value, because a loss that
# begins near 0 provides no scale.
_MIN_LEVEL = 1.0
# The beginning and the end of a curve consist of at least this many losses.
_MIN_LOSSES_AT_ENDS = 3
# Slow noise is estimated from the medians of this many blocks, if each block has at least
# `_MIN_BLOCK_LOSSES` losses.
_BLOCKS = 8
_MIN_BLOCK_LOSSES = 4
# The median of ``|a - 2 b + c|`` for independent, normally distributed values with a standard
# deviation of 1.
_MEDIAN_NORMAL_DISTANCE = 0.6745 * math.sqrt(6)
# For normally distributed values, the ratio of the median's standard error to that of the mean.
_MEDIAN_ERROR_FACTOR = 1.25
# If the outcomes of several ranks differ, the outcome that comes first here is reported.
_OUTCOMES_BY_CERTAINTY = ("spiked", "fell", "flat", "rose", "unclear")


def judge_learning_of_run(
    curves: Iterable[Sequence[LossReading]], *, by_reward: bool = False
) -> Learning:
    """Return whether the loss of a run fell, according to the losses of its processes.

    Args:
        curves: The recorded losses of each rank or training process, oldest first.
        by_reward: Whether the script imported a reinforcement-learning environment package.

    Returns:
        The most certain outcome of any curve. One curve is enough, because all ranks compute the
        same loss on different samples.
    """
    if by_reward:
        reason = "the loss of a policy that is trained by reward does not measure its progress"
        return Learning(outcome="unclear", reason=reason)
    return min(
        (judge_learning_of_process(curve) for curve in curves if curve),
        key=lambda learning: _OUTCOMES_BY_CERTAINTY.index(learning.outcome),
        default=Learning(outcome="unclear", reason="no loss was recorded"),
    )


def judge_learning_from_output(log: LogText) -> Learning | None:
    """Return whether the printed loss fell, or None if too few losses were printed.

    If the printed loss did not fall, the outcome is "unclear", because it may be a validation loss.
    """
    if len(log.losses) < MIN_LOSSES:
        return None
    learning = judge_learning([LossReading(line, loss) for line, loss in log.losses])
    if learning.outcome in ("fell", "unclear"):
        return learning
    reason = "only printed losses are known; they did not fall, but may be validation losses"
    return Learning(outcome="unclear", reason=reason)


def judge_learning_of_process(readings: Sequence[LossReading]) -> Learning:
    """Return whether the loss of one process fell.

    If the process trained several models one after another, only the last model is judged.
    """
    stretches = _by_optimizer(readings)
    optimizers = {stretch[0].optimizer for stretch in stretches}
    # On average, each optimizer took at least two turns. If the optimizers were used one after
    # another, each of them would have only one stretch.
    if len(stretches) >= 2 * len(optimizers):
        reason = "several optimizers took turns, each with its own loss"
        return Learning(outcome="unclear", reason=reason)
    long_enough = [stretch for stretch in stretches if len(stretch) >= MIN_LOSSES]
    newest = long_enough[-1] if long_enough else readings
    learning = judge_learning(newest)
    first = newest[0]
    begins_late = first is readings[0] and first.step > MIN_LOSSES
    if learning.outcome == "flat" and begins_late:
        reason = f"the losses before step {first.step:,} are not recorded here"
        return Learning(outcome="unclear", reason=reason)
    return learning


def _by_optimizer(readings: Sequence[LossReading]) -> list[list[LossReading]]:
    """Split the readings into stretches of consecutive steps with the same optimizer."""
    stretches: list[list[LossReading]] = []
    for reading in readings:
        if not stretches or stretches[-1][-1].optimizer != reading.optimizer:
            stretches.append([])
        stretches[-1].append(reading)
    return stretches


def judge_learning(readings: Sequence[LossReading]) -> Learning:
    """Return whether a loss fell from the beginning to the end by more than its noise."""
    finite = [reading for reading in readings if math.isfinite(reading.loss)]
    if len(finite) < MIN_LOSSES:
        reason = f"only {len(finite)} losses were recorded" if finite else "no loss was recorded"
        return Learning(outcome="unclear", reason=reason)
    curve = _LossCurve(finite)
    for rule in _RULES:
        learning = rule(curve)
        if learning is not None:
            return learning
    return curve.learning("flat")


class _LossCurve:
    """The finite losses of a training process, with their levels at the beginning and the end."""

    def __init__(self, readings: Sequence[LossReading]) -> None:
        self.readings = readings
        self.losses = [reading.loss for reading in readings]
        # The first and the last quarter, with at least three losses each.
        self.size_of_end = max(len(self.losses) // 4, _MIN_LOSSES_AT_ENDS)
        self.beginning = self.losses[: self.size_of_end]
        self.end = self.losses[-self.size_of_end :]
        # The medians of both quarters, and the standard error of the difference between them.
        self.first = statistics.median(self.beginning)
        self.last = statistics.median(self.end)
        self.error_of_fall = math.hypot(_standard_error(self.beginning), _standard_error(self.end))
        self.is_constant = min(self.losses) == max(self.losses)

    def learning(
        self, outcome: Literal["fell", "flat", "rose"], *, first: float | None = None
    ) -> Learning:
        """Return a `Learning` with an outcome and the levels at the beginning and at the end.

        Args:
            outcome: Whether the loss fell, was flat or rose.
            first: The level at the beginning. The default is the median of the first quarter.
        """
        level = self.first if first is None else first
        return Learning(outcome=outcome, first=level, last=self.last, constant=self.is_constant)


def _changes_sign_all_the_time(curve: _LossCurve) -> Learning | None:
    """Return "unclear" for a loss that has both signs throughout, such as that of a critic.

    Such a loss does not measure progress.
    """
    if _has_both_signs(curve.beginning) and _has_both_signs(curve.end):
        reason = "the loss keeps changing sign, so it does not measure progress"
        return Learning(outcome="unclear", reason=reason)
    return None


def _spiked(curve: _LossCurve) -> Learning | None:
    """Return "spiked" for two consecutive losses far above the first, even after a recovery."""
    limit = _SPIKE_FACTOR * max(abs(curve.losses[0]), _MIN_LEVEL)
    for before, after in itertools.pairwise(curve.readings):
        if min(before.loss, after.loss) > limit:
            return Learning(
                outcome="spiked",
                first=curve.losses[0],
                last=max(curve.losses),
                step=before.step,
            )
    return None


def _only_came_back_down(curve: _LossCurve) -> Learning | None:
    """Return "flat" for a loss that rose early and then fell, but not below its first value.

    Such an early rise is caused by a learning rate that is too high.
    """
    first = curve.losses[0]
    rose_first = curve.first - first > _CLEAR_RISE_DEVIATIONS * _estimate_noise(curve.end)
    if rose_first and first <= curve.last <= curve.first:
        return curve.learning("flat", first=first)
    return None


def _fell(curve: _LossCurve) -> Learning | None:
    """Return "fell" for a fall that clearly exceeds the noise."""
    first = _level_it_fell_from(curve, _SURE_ERRORS)
    return None if first is None else curve.learning("fell", first=first)


def _changes_sign(curve: _LossCurve) -> Learning | None:
    """Return "unclear" for a loss that has both signs at the beginning or at the end.

    This rule comes after `_fell`, so such a loss can still count as fallen, but not as flat.
    """
    if _has_both_signs(curve.beginning) or _has_both_signs(curve.end):
        reason = "the loss changes sign and does not fall by more than its noise"
        return Learning(outcome="unclear", reason=reason)
    return None


def _fell_by_little_more_than_noise(curve: _LossCurve) -> Learning | None:
    """Return "unclear" for a fall that is barely larger than the noise."""
    if _level_it_fell_from(curve, _LIKELY_ERRORS) is not None:
        reason = "the loss is lower at the end, but by little more than its noise"
        return Learning(outcome="unclear", reason=reason)
    return None


def _rose(curve: _LossCurve) -> Learning | None:
    """Return "rose" for a loss that ended above its beginning.

    A rise needs less certainty than a fall, because it only shows that the loss did not fall.
    """
    is_rise = _is_fall(curve.last, curve.first, _LIKELY_ERRORS * curve.error_of_fall)
    return curve.learning("rose") if is_rise else None


def _noise_would_hide_a_fall(curve: _LossCurve) -> Learning | None:
    """Return "unclear" for a loss whose noise could hide a meaningful fall."""
    largest_fall = curve.first - curve.last + _LIKELY_ERRORS * curve.error_of_fall
    if largest_fall > _MAX_HIDDEN_FALL_SHARE * max(abs(curve.first), abs(curve.last)):
        return Learning(outcome="unclear", reason="the loss is too noisy to show a fall")
    return None


def _was_low_from_the_beginning(curve: _LossCurve) -> Learning | None:
    """Return "unclear" for a loss that is low from the beginning but varies.

    The model may have been pretrained.
    """
    if 0 < curve.first < _LOW_LEVEL and not curve.is_constant:
        reason = (
            f"the loss was low from the beginning: {curve.first:.3g} at first, {curve.last:.3g} at"
            " the end"
        )
        return Learning(outcome="unclear", reason=reason)
    return None


# The first rule that returns a `Learning` wins. If no rule returns one, the loss is flat.
_RULES: tuple[Callable[[_LossCurve], Learning | None], ...] = (
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


def _level_it_fell_from(curve: _LossCurve, errors: float) -> float | None:
    """Return the level at the beginning from which the loss fell, or None if it did not fall.

    Some losses fall within a few steps and then stay flat, whereas others keep falling. The level
    at the beginning is therefore measured over windows of different sizes, from the first loss
    alone to the first quarter. The level of the first window that shows a fall is returned.

    Args:
        curve: The losses of a training process.
        errors: By how many standard errors the end must be lower than the beginning.
    """
    losses = curve.losses
    noise = max(_estimate_noise(curve.end), _estimate_noise(losses[:MIN_LOSSES]))
    stays_below_first = losses[0] > max(losses[len(losses) // 2 :])
    if stays_below_first and _is_fall(
        losses[0], curve.last, _SURE_DEVIATIONS_FROM_ONE_LOSS * noise
    ):
        return losses[0]
    sizes = [_MIN_LOSSES_AT_ENDS]
    while 2 * sizes[-1] < curve.size_of_end:
        sizes.append(2 * sizes[-1])
    sizes.append(curve.size_of_end)
    for size in sizes:
        window = losses[:size]
        level = statistics.median(window)
        # The noise may be underestimated in a small window, so the noise computed above is used as
        # a lower bound.
        error = max(_standard_error(window), _MEDIAN_ERROR_FACTOR * noise / math.sqrt(size))
        if _is_fall(level, curve.last, errors * math.hypot(error, _standard_error(curve.end))):
            return level
    return None


def _is_fall(first: float, last: float, noise: float) -> bool:
    """Return whether a level fell by more than the noise and by at least `_MIN_FALL_SHARE`."""
    return first - last > noise and first - last >= _MIN_FALL_SHARE * max(abs(first), abs(last))


def _estimate_noise(losses: Sequence[float]) -> float:
    """Return the standard deviation of the noise in a series of losses.

    The noise is estimated from the difference between each loss and the mean of its two neighbors.
    A steady rise or fall of the loss does not affect this difference.
    """
    triples = zip(losses, losses[1:], losses[2:], strict=False)
    distances = [abs(before - 2 * loss + after) for before, loss, after in triples]
    return statistics.median(distances) / _MEDIAN_NORMAL_DISTANCE if distances else 0.0


def _standard_error(losses: Sequence[float]) -> float:
    """Return the standard error of the median of a series of losses.

    If there are enough losses, the spread of the medians of several blocks is a lower bound. This
    accounts for noise that changes slowly.
    """
    error = _MEDIAN_ERROR_FACTOR * _estimate_noise(losses) / math.sqrt(len(losses))
    size = len(losses) // _BLOCKS
    if size < _MIN_BLOCK_LOSSES:
        return error
    blocks = [
        statistics.median(losses[number * size : (number + 1) * size]) for number in range(_BLOCKS)
    ]
    return max(error, statistics.stdev(blocks) / math.sqrt(_BLOCKS))


def _has_both_signs(losses: Sequence[float]) -> bool:
    """Return whether at least `_MIN_SHARE_OF_RARER_SIGN` of the losses have the rarer sign."""
    negative = sum(loss < 0 for loss in losses)
    return min(negative, len(losses) - negative) >= _MIN_SHARE_OF_RARER_SIGN * len(losses)
