"""Write the verdict on the record of another tool.

A record does not say how its process ended, so this verdict says nothing about it, unlike those of
``explain.judging``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from holdfast.core.text import capitalized, counted
from holdfast.explain.certainty import Certainty
from holdfast.explain.records.judging import JudgedLoss, judge_loss
from holdfast.explain.records.record import Record
from holdfast.explain.signatures import all_signatures, ids
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.explain.wording.fixes import FIX_FOR_NONFINITE_FIRST_LOSS

_HOW_IT_ENDED = (
    "how the process ended: metrics do not say that (explain its log, or start the next run with"
    " `holdfast run`)"
)
# How many of the losses that were not chosen are named.
_MAX_OTHERS = 3


def judge_record(record: Record) -> Verdict:
    """Return the verdict on the loss in a record."""
    judged = judge_loss(record)
    cause = _cause(judged)
    signature = all_signatures()[cause]
    sentence = _finding(judged, record.unit)
    fix = signature.fix
    if cause == ids.LOSS_NOT_FINITE:
        fix = FIX_FOR_NONFINITE_FIRST_LOSS
    elif cause == ids.LOSS_FELL:
        fix = ""
    return Verdict(
        cause=cause,
        family="numerics" if _diverged(judged) else "learning",
        title=_title(judged, sentence),
        summary=" ".join(_summary(record, judged, sentence)),
        fix=fix,
        certainty=_certainty(judged),
        evidence=tuple(_exhibits(record, judged)),
        missing=tuple(_missing(record)),
        step=record.last_step if record.unit == "step" else None,
    )


def _diverged(judged: JudgedLoss) -> bool:
    return judged.divergence is not None and judged.divergence.exploded


def _cause(judged: JudgedLoss) -> str:
    """Return the id of the signature for what a loss shows."""
    divergence = judged.divergence
    if divergence is not None and divergence.exploded:
        always = divergence.quantity == "loss" and divergence.always
        return ids.LOSS_NOT_FINITE if always else ids.TRAINING_DIVERGED
    if divergence is not None or judged.learning.outcome in ("flat", "spiked"):
        return ids.NOT_LEARNED
    if judged.learning.outcome == "fell":
        return ids.LOSS_FELL
    return ids.NOT_JUDGED


def _certainty(judged: JudgedLoss) -> Certainty | None:
    """Return how certain a divergence is. What else a loss shows was seen, not inferred."""
    if not _diverged(judged) or judged.divergence is None:
        return None
    return "likely" if judged.divergence.rose is not None else "certain"


def _finding(judged: JudgedLoss, unit: str) -> str:
    """Return what a loss shows, as a clause.

    Args:
        judged: The loss.
        unit: What its steps count.
    """
    if judged.divergence is None:
        return judged.learning.clause()
    return judged.divergence.clause().replace(" step ", f" {unit} ")


def _title(judged: JudgedLoss, sentence: str) -> str:
    if _cause(judged) != ids.NOT_JUDGED:
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
    yield f"{capitalized(sentence)}."
    if judged.learning.outcome == "rose" and judged.divergence is None:
        yield "A changing objective or a learning rate that is too high can cause this."
    yield from record.notes
    if _diverged(judged):
        yield "Do not use anything that the run has saved since then."


def _exhibits(record: Record, judged: JudgedLoss) -> Iterator[Exhibit]:
    """Yield the values of the loss and, if they say how the training diverged, of the gradients."""
    names = [judged.chosen.name] if judged.chosen is not None else []
    if judged.divergence is not None and judged.divergence.quantity == "gradients":
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
