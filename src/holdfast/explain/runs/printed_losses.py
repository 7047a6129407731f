"""Judge a training run by its printed losses, for runs whose steps were not recorded."""

from __future__ import annotations

from holdfast.explain.evidence import Learning, LostTraining
from holdfast.explain.logs.text import LogText
from holdfast.explain.runs.curves import find_lost, find_risen_loss
from holdfast.explain.runs.learning import FEWEST_LOSSES, Reading, learning_of


def lost_from_output(log: LogText, *, name: str) -> LostTraining | None:
    """Return how a training run diverged or ended far above its start, judged by its log.

    Args:
        log: The log.
        name: The name of the log for sentences.
    """
    return find_lost(log.losses, log.norms, log=name) or find_risen_loss(log.losses, log=name)


def learning_from_output(log: LogText) -> Learning | None:
    """Return whether the printed loss fell, or None if too few losses were printed.

    If it did not fall, the outcome is unclear, because it may not be the training loss.
    """
    if len(log.losses) < FEWEST_LOSSES:
        return None
    learning = learning_of([Reading(line, loss) for line, loss in log.losses])
    if learning.outcome in ("fell", "unclear"):
        return learning
    reason = "only printed losses are known; they did not fall, but may be validation losses"
    return Learning(outcome="unclear", reason=reason)
