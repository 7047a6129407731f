"""Judge the loss in the record of another tool, and write the verdict.

The curve is judged by the same rules as those of holdfast's own runs. A record does not say how its
process ended, so this verdict says nothing about it, unlike those of ``explain.judging``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.core.text import counted
from holdfast.explain.certainty import Certainty
from holdfast.explain.evidence import Learning, LostTraining
from holdfast.explain.records.loss_names import (
    ChosenLoss,
    choose_loss,
    choose_norm,
    why_loss_is_no_measure,
)
from holdfast.explain.records.record import Record
from holdfast.explain.records.series import Series
from holdfast.explain.runs.divergence import Point, find_lost, find_risen_loss
from holdfast.explain.runs.learning import MIN_LOSSES, learning_of
from holdfast.explain.runs.recorded_steps import LossReading
from holdfast.explain.signatures import all_signatures, endings
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.explain.wording.verdict_words import FIX_OF_A_LOSS_THAT_NEVER_WAS_FINITE

_HOW_IT_ENDED = (
    "how the process ended: metrics do not say that (explain its log, or start the next run with"
    " `holdfast run`)"
)
# A curve that begins behind this share of its steps may have fallen before.
_MAX_SHARE_BEFORE_FIRST = 0.05
# A loss that is exactly 0 from one value to the next has probably been replaced: older versions of
# the Trainer write 0 for NaN and no norm of the gradients. A loss that really falls to 0 passes
# through values below this one.
_LEAST_BEFORE_ZERO = 1e-3
_MAX_OTHERS = 3
# `find_lost` needs to know that there are several, but not how many.
_MAX_NONFINITE_POINTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLoss:
    """What the loss of a record shows.

    Attributes:
        chosen: The series that was judged, or None if the record has no loss.
        lost: How the training diverged, or None if it did not.
        learning: Whether the loss fell.
        norm: The name of the series of gradient norms; empty if there is none.
    """

    chosen: ChosenLoss | None
    lost: LostTraining | None
    learning: Learning
    norm: str = ""


def judge_record(record: Record) -> Verdict:
    """Return the verdict on the loss in a record."""
    judged = judge_loss(record)
    cause = _cause(judged)
    signature = all_signatures()[cause]
    sentence = _finding(judged, record.unit)
    fix = signature.fix
    if cause == endings.LOSS_NOT_FINITE:
        fix = FIX_OF_A_LOSS_THAT_NEVER_WAS_FINITE
    elif cause == endings.LOSS_FELL:
        fix = ""
    return Verdict(
        cause=cause,
        family="numerics" if _is_lost(judged) else "learning",
        title=_title(judged, sentence),
        summary=" ".join(_summary(record, judged, sentence)),
        fix=fix,
        certainty=_certainty(judged),
        evidence=tuple(_exhibits(record, judged)),
        missing=tuple(_missing(record)),
        step=record.last_step if record.unit == "step" else None,
    )


def judge_loss(record: Record) -> JudgedLoss:
    """Return whether the loss of a record diverged or fell."""
    names = [name for name, series in record.series.items() if series.points()]
    chosen = choose_loss(names)
    if chosen is not None:
        chosen = _prefer_lost(record, chosen)
    norm = choose_norm(names)
    losses = _points(record.series[chosen.name]) if chosen is not None else []
    norms = _points(record.series[norm]) if norm is not None else []
    log = record.file if record.unit == "line" else ""
    no_measure = why_loss_is_no_measure(names)
    lost = find_lost(losses, norms, log=log)
    if lost is None and not no_measure:
        lost = find_risen_loss(losses, log=log)
    if no_measure:
        learning = Learning(outcome="unclear", reason=no_measure)
    elif chosen is None:
        learning = Learning(outcome="unclear", reason="no metric in the record is a loss")
    else:
        learning = _learning(record, chosen, losses)
    return JudgedLoss(chosen=chosen, lost=lost, learning=learning, norm=norm or "")


def _prefer_lost(record: Record, chosen: ChosenLoss) -> ChosenLoss:
    """Return the chosen loss, or another one that could have been chosen if only that one diverged.

    A loss that was never finite is not preferred: it may be one that the script does not use.
    """
    for name in (chosen.name, *chosen.others):
        lost = find_lost(_points(record.series[name]))
        if lost is not None and not lost.always:
            others = [other for other in (chosen.name, *chosen.others) if other != name]
            return replace(chosen, name=name, others=tuple(others))
    return chosen


def _points(series: Series) -> list[Point]:
    """Return the steps and values of a series for `find_lost`.

    If the newest values are not finite, they come last, with the step at which they begin.
    """
    points = [(point.step, point.mean) for point in series.points() if point.finite]
    end = series.end()
    if end.nonfinite_since is not None:
        points += [(end.nonfinite_since, math.nan)] * min(end.nonfinite, _MAX_NONFINITE_POINTS)
    return points


def _learning(record: Record, chosen: ChosenLoss, losses: list[Point]) -> Learning:
    """Return whether a loss fell, without blaming a loss that may have fallen unseen."""
    zeros = _sudden_zeros(losses)
    if zeros:
        reason = (
            f"the last {counted(zeros, 'value')} of the loss are exactly 0, which the Trainer of"
            " transformers also writes for NaN"
        )
        return Learning(outcome="unclear", reason=reason)
    if losses and not math.isfinite(losses[-1][1]):
        # A single such value is no divergence: its batch may have been skipped.
        return Learning(outcome="unclear", reason="the newest value of the loss is not finite")
    learning = learning_of([LossReading(step, loss) for step, loss in losses])
    if learning.outcome in ("fell", "unclear", "spiked"):
        return learning
    if chosen.of == "evaluation":
        reason = "only an evaluation loss was logged, and it did not fall"
        return Learning(outcome="unclear", reason=reason)
    if chosen.others:
        reason = f"{chosen.name!r} did not fall, but it is only one of several losses"
        return Learning(outcome="unclear", reason=reason)
    first_step = losses[0][0]
    latest_begin = max(MIN_LOSSES, _MAX_SHARE_BEFORE_FIRST * losses[-1][0])
    if learning.outcome == "flat" and record.unit == "step" and first_step > latest_begin:
        reason = f"the loss did not fall, but its values before step {first_step:,} were not logged"
        return Learning(outcome="unclear", reason=reason)
    return learning


def _sudden_zeros(losses: list[Point]) -> int:
    """Return how many values at the end are exactly 0 right after a value that is not small."""
    for zeros, (_, loss) in enumerate(reversed(losses)):
        if loss != 0.0:
            return zeros if abs(loss) > _LEAST_BEFORE_ZERO else 0
    return 0


# --- Words ----------------------------------------------------------------------------------------


def _is_lost(judged: JudgedLoss) -> bool:
    return judged.lost is not None and judged.lost.exploded


def _cause(judged: JudgedLoss) -> str:
    """Return the id of the signature for what a loss shows."""
    lost = judged.lost
    if lost is not None and lost.exploded:
        always = lost.what == "loss" and lost.always
        return endings.LOSS_NOT_FINITE if always else endings.TRAINING_LOST
    if lost is not None or judged.learning.outcome in ("flat", "spiked"):
        return endings.NOT_LEARNED
    if judged.learning.outcome == "fell":
        return endings.LOSS_FELL
    return endings.NOT_JUDGED


def _certainty(judged: JudgedLoss) -> Certainty | None:
    """Return how certain a divergence is. What else a loss shows was seen, not inferred."""
    if not _is_lost(judged) or judged.lost is None:
        return None
    return "likely" if judged.lost.rose is not None else "certain"


def _finding(judged: JudgedLoss, unit: str) -> str:
    """Return what a loss shows, as a clause.

    Args:
        judged: The loss.
        unit: What its steps count.
    """
    if judged.lost is None:
        return judged.learning.sentence()
    return judged.lost.sentence().replace(" step ", f" {unit} ")


def _title(judged: JudgedLoss, sentence: str) -> str:
    if _cause(judged) != endings.NOT_JUDGED:
        return sentence
    if judged.learning.outcome == "rose":
        return f"{sentence}; learning was not judged"
    return f"learning was not judged: {sentence}"


def _summary(record: Record, judged: JudgedLoss, sentence: str) -> Iterator[str]:
    chosen = judged.chosen
    if chosen is not None:
        series = record.series[chosen.name]
        end = series.end()
        yield (
            f"{record.file} ({record.tool}) has {counted(end.size, 'value')} of"
            f" {chosen.name!r}, from {record.unit} {series.first_step:,} to {end.last_step:,}."
        )
        if chosen.others:
            shown = ", ".join(repr(name) for name in chosen.others[:_MAX_OTHERS])
            yield f"It was judged because no loss has a plain name; there is also {shown}."
        elif not chosen.is_plain:
            yield "It was judged because it is the only metric that is named a loss."
    yield f"{sentence[:1].upper()}{sentence[1:]}."
    if judged.learning.outcome == "rose" and judged.lost is None:
        yield "A changing objective or a learning rate that is too high can cause this."
    yield from record.notes
    if _is_lost(judged):
        yield "What it saved since then is of no use."


def _exhibits(record: Record, judged: JudgedLoss) -> Iterator[Exhibit]:
    """Yield the values of the loss and, if they say how the training diverged, of the gradients."""
    names = [judged.chosen.name] if judged.chosen is not None else []
    if judged.lost is not None and judged.lost.what == "gradients":
        names = [judged.norm, *names]
    for name in names:
        series = record.series[name]
        words = f"newest value {series.end().last:.6g}"
        if math.isfinite(series.low):
            words += f", lowest {series.low:.6g}, highest {series.high:.6g}"
        yield Exhibit(text=words, source=f"{record.file}: {name}")


def _missing(record: Record) -> Iterator[str]:
    yield _HOW_IT_ENDED
    yield from record.missing
