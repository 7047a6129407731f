"""What the losses that a log shows say about a training, where nothing recorded its steps."""

from __future__ import annotations

from holdfast.explain.evidence import Learning, Lost
from holdfast.explain.logs.text import LogText
from holdfast.explain.runs.curves import find_lost, find_risen_loss
from holdfast.explain.runs.learning import FEWEST_LOSSES, Reading, learning_of


def lost_from_output(log: LogText, *, name: str) -> Lost | None:
    """Return that a training was lost, or ended far above where it began, as its log shows it.

    Args:
        log: The log.
        name: How to call it in a sentence.
    """
    return find_lost(log.losses, log.norms, log=name) or find_risen_loss(log.losses, log=name)


def learning_from_output(log: LogText) -> Learning | None:
    """Return whether the loss that a log shows fell, or None if it shows too few losses.

    A loss that did not fall is unclear, since it may be the loss of something else.
    """
    if len(log.losses) < FEWEST_LOSSES:
        return None
    learning = learning_of([Reading(line, loss) for line, loss in log.losses])
    if learning.outcome in ("fell", "unclear"):
        return learning
    reason = "only a printed loss is known, and it did not fall, which may be that of a validation"
    return Learning(outcome="unclear", reason=reason)
