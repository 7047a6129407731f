"""Judge whether the loss in the record of another tool diverged or fell.

The curve is judged by the same rules as those of holdfast's own runs. ``verdict`` writes the
verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from holdfast.core.text import counted
from holdfast.explain.evidence import Divergence, Learning
from holdfast.explain.records.loss_names import (
    ChosenLoss,
    choose_loss,
    choose_norm,
    why_loss_is_no_measure,
)
from holdfast.explain.records.record import Record
from holdfast.explain.records.series import Series
from holdfast.explain.runs.divergence import Point, find_divergence, find_risen_loss
from holdfast.explain.runs.learning import MIN_LOSSES, judge_learning
from holdfast.explain.runs.recorded_steps import LossReading

# A curve that begins after this share of its steps may have fallen before.
_MAX_SHARE_BEFORE_FIRST = 0.05
# A loss that is exactly 0 from one value to the next has probably been replaced: older versions of
# the Trainer write 0 for NaN and no norm of the gradients. A loss that really falls to 0 passes
# through values below this one.
_MIN_LOSS_BEFORE_ZERO = 1e-3
# `find_divergence` needs to know that there are several, but not how many.
_MAX_NONFINITE_POINTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLoss:
    """What the loss of a record shows.

    Attributes:
        chosen: The series that was judged, or None if the record has no loss.
        divergence: How the training diverged, or None if it did not.
        learning: Whether the loss fell.
        norm: The name of the series of gradient norms; empty if there is none.
    """

    chosen: ChosenLoss | None
    divergence: Divergence | None
    learning: Learning
    norm: str = ""


def judge_loss(record: Record) -> JudgedLoss:
    """Return whether the loss of a record diverged or fell."""
    names = [name for name, series in record.series.items() if series.points()]
    chosen = choose_loss(names)
    if chosen is not None:
        chosen = _prefer_diverged_loss(record, chosen)
    norm = choose_norm(names)
    losses = _points(record.series[chosen.name]) if chosen is not None else []
    norms = _points(record.series[norm]) if norm is not None else []
    log = record.file if record.unit == "line" else ""
    no_measure = why_loss_is_no_measure(names)
    divergence = find_divergence(losses, norms, log=log)
    if divergence is None and not no_measure:
        divergence = find_risen_loss(losses, log=log)
    if no_measure:
        learning = Learning(outcome="unclear", reason=no_measure)
    else:
        learning = _judge_learning(record, chosen, losses)
    return JudgedLoss(chosen=chosen, divergence=divergence, learning=learning, norm=norm or "")


def _prefer_diverged_loss(record: Record, chosen: ChosenLoss) -> ChosenLoss:
    """Return the chosen loss, or another one that could have been chosen if only that one diverged.

    A loss that was never finite is not preferred: it may be one that the script does not use.
    """
    for name in (chosen.name, *chosen.others):
        divergence = find_divergence(_points(record.series[name]))
        if divergence is not None and not divergence.always:
            others = [other for other in (chosen.name, *chosen.others) if other != name]
            return replace(chosen, name=name, others=tuple(others))
    return chosen


def _points(series: Series) -> list[Point]:
    """Return the steps and values of a series for `find_divergence`.

    If the newest values are not finite, they come last, with the step at which they begin.
    """
    points = [(point.step, point.mean) for point in series.points() if point.finite]
    end = series.end()
    if end.nonfinite_since is not None:
        points += [(end.nonfinite_since, math.nan)] * min(end.nonfinite, _MAX_NONFINITE_POINTS)
    return points


def _judge_learning(record: Record, chosen: ChosenLoss | None, losses: list[Point]) -> Learning:
    """Return whether a loss fell, without blaming a loss that may have fallen unseen."""
    if chosen is None:
        return Learning(outcome="unclear", reason="no metric in the record is a loss")
    reason = _why_values_are_doubtful(losses)
    if reason:
        return Learning(outcome="unclear", reason=reason)
    learning = judge_learning([LossReading(step, loss) for step, loss in losses])
    if learning.outcome in ("fell", "unclear", "spiked"):
        return learning
    reason = _why_fall_may_be_unseen(record, chosen, losses, is_flat=learning.outcome == "flat")
    if reason:
        return Learning(outcome="unclear", reason=reason)
    return learning


def _why_values_are_doubtful(losses: list[Point]) -> str:
    """Return why the newest values of a loss say nothing, as a clause; empty if they do."""
    zeros = _sudden_zeros(losses)
    if zeros:
        return (
            f"the last {counted(zeros, 'value')} of the loss are exactly 0, which the Trainer of"
            " transformers also writes for NaN"
        )
    if losses and not math.isfinite(losses[-1][1]):
        # A single such value is no divergence: its batch may have been skipped.
        return "the newest value of the loss is not finite"
    return ""


def _why_fall_may_be_unseen(
    record: Record, chosen: ChosenLoss, losses: list[Point], *, is_flat: bool
) -> str:
    """Return why training may have made progress although this loss did not fall, as a clause.

    Args:
        record: The record.
        chosen: The loss that was judged.
        losses: The steps and values of this loss, of which there is at least one.
        is_flat: Whether the loss neither fell nor rose.

    Returns:
        The clause; empty if the loss shows that there was no progress.
    """
    if chosen.kind == "evaluation":
        return "only an evaluation loss was logged, and it did not fall"
    if chosen.others:
        return f"{chosen.name!r} did not fall, but it is only one of several losses"
    first_step = losses[0][0]
    latest_start = max(MIN_LOSSES, _MAX_SHARE_BEFORE_FIRST * losses[-1][0])
    if is_flat and record.unit == "step" and first_step > latest_start:
        return f"the loss did not fall, but its values before step {first_step:,} were not logged"
    return ""


def _sudden_zeros(losses: list[Point]) -> int:
    """Return how many values at the end are exactly 0 right after a value that is not small."""
    for zeros, (_, loss) in enumerate(reversed(losses)):
        if loss != 0.0:
            return zeros if abs(loss) > _MIN_LOSS_BEFORE_ZERO else 0
    return 0
