"""The differences that an attempt can have from the undisturbed run, with their descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The fields of a step that are compared, from cause to effect: a field is blamed only if all fields
# above it are equal. The keys are attributes of `trace.RecordedStep`.
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

# Fields to compare at the start of an attempt, in addition to the weights.
START_FIELDS = {
    "buffers": "the buffers, such as BatchNorm statistics, differ at the start of the attempt",
    "optimizer": "the optimizer state differs at the start of the attempt",
}

# Other values of `RunDifference.what`.
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
    """A difference from the undisturbed run: the first step that differs, and how it differs.

    The attributes have the same names in the output of ``holdfast chaos --json``.

    Args:
        step: Number of the step, counted from 1.
        what: A key of `FIELDS` or `START_FIELDS`, or `SAVED`, `TEXT`, `END` or `OLDER`.
        detail: The difference in words.
        states: If random states are the cause, the names of their generators.
    """

    step: int
    what: str
    detail: str
    states: Sequence[str] = ()

    def __str__(self) -> str:
        if self.what == SAVED:
            return self.detail
        return f"step {self.step}: {self.detail}"
