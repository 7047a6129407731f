"""The vocabulary of comparisons: what can differ between an attempt and the undisturbed run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The compared fields of a step, in the order of cause and effect: a field can only be blamed if all
# fields above it agree. The keys are attributes of `trace.RecordedStep`.
FIELDS = {
    "settings": "the learning rate or another optimizer setting differs",
    "scale": "the loss scale of the gradient scaler differs",
    "parts": "the step consists of a different number of batches (model calls)",
    "batch": "the loader returned a different batch",
    "random": "the random state differs",
    "inputs": "the model received different inputs",
    "losses": "the loss differs although weights and inputs are the same",
    "weights": "the weights after the step differ although everything before is the same",
    "buffers": "the buffers after the step differ although everything before is the same",
}

# The compared fields of the state in which an attempt starts, besides the weights.
START_FIELDS = {
    "buffers": "the buffers, such as BatchNorm statistics, differ at the start of the attempt",
    "optimizer": "the optimizer state differs at the start of the attempt",
}

# Further values of `RunDifference.what`.
# A saved entry differs although all steps are the same.
SAVED = "saved"
# A saved text or flag differs, which is harmless.
TEXT = "text"
# The run ended after fewer or more steps.
END = "end"
# The attempt resumed from an older checkpoint than the newest complete one.
OLDER = "older"


@dataclass(frozen=True, slots=True)
class RunDifference:
    """The first step at which a run differs from the undisturbed run, and the field that differs.

    Fields are named as in the output of ``holdfast chaos --json``.

    Args:
        step: Number of the step, from 1.
        what: The field that differs: a key of `FIELDS` or `START_FIELDS`, or one of the values
            below them.
        detail: The difference in words.
        states: Names of the random generators whose states differ, if these are the cause.
    """

    step: int
    what: str
    detail: str
    states: Sequence[str] = ()

    def __str__(self) -> str:
        if self.what == SAVED:
            return self.detail
        return f"step {self.step}: {self.detail}"
