"""The ways in which an attempt can differ from the undisturbed run, with their descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The fields of a step that are compared, from cause to effect: a field is reported only if all
# fields above it are equal. The keys are attributes of `trace.RecordedStep`.
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

# The fields that are compared at the start of an attempt, in addition to the weights.
START_FIELDS = {
    "buffers": "the buffers, such as BatchNorm statistics, differ at the start of the attempt",
    "optimizer": "the optimizer state differs at the start of the attempt",
}

# The other possible values of `RunDifference.what`:
# A saved entry differs although all steps are the same.
SAVED = "saved"
# A saved string or flag differs, which is harmless.
TEXT = "text"
# The run has fewer or more steps than the undisturbed run.
END = "end"
# The attempt resumed from an older checkpoint although a newer, complete one existed.
OLDER = "older"


@dataclass(frozen=True, slots=True)
class RunDifference:
    """A difference from the undisturbed run: the step at which it first shows, and what differs.

    The attributes have the same names in the output of ``holdfast chaos --json``.

    Args:
        step: The number of the step, counted from 1.
        what: A key of `FIELDS` or `START_FIELDS`, or one of `SAVED`, `TEXT`, `END` and `OLDER`.
        detail: A description of the difference.
        states: The names of the random generators whose states caused the difference; empty if the
            cause is something else.
    """

    step: int
    what: str
    detail: str
    states: Sequence[str] = ()

    def __str__(self) -> str:
        if self.what == SAVED:
            return self.detail
        return f"step {self.step}: {self.detail}"
