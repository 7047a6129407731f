"""Decisions about how to respond to a failure.

Several packages propose decisions, but only the guard carries them out.
"""

from __future__ import annotations

from typing import ClassVar

from holdfast.core.events.data import EventData, Promise
from holdfast.core.text import counted, listed


class Decision(EventData):
    """A proposed response to a failure.

    `reason` is an explanation for people to read. `promise` says how the run's results will compare
    with those of an undisturbed run.
    """

    kind: ClassVar[str] = ""
    reason: str
    promise: Promise


class StepRefused(Decision):
    """A proposed response to a step that must not take effect.

    `nonfinite` says whether that is because of NaN or Inf.
    """

    kind: ClassVar[str] = ""
    nonfinite: bool = False


class Retry(Decision):
    """Repeat the attempt at this step after freeing memory."""

    def __str__(self) -> str:
        return f"retrying the step: {self.reason} ({self.promise})"


class Recompute(Decision):
    """Repeat the attempt at this step with activation checkpointing of `modules`.

    If `modules` is empty, activation checkpointing is switched off.
    """

    modules: tuple[str, ...]

    def __str__(self) -> str:
        if not self.modules:
            return f"switching activation checkpointing off: {self.reason} ({self.promise})"
        modules = listed(self.modules)
        return (
            f"retrying with activation checkpointing of {modules}: {self.reason} ({self.promise})"
        )


class Split(Decision):
    """Repeat the attempt at this step with `micro_batch_size` samples per forward/backward pass."""

    micro_batch_size: int

    def __str__(self) -> str:
        samples = counted(self.micro_batch_size, "sample")
        return f"retrying with micro-batches of {samples}: {self.reason} ({self.promise})"


class Grow(Decision):
    """Try more samples per forward/backward pass, starting with the next step.

    A `micro_batch_size` of None means the whole batch.
    """

    micro_batch_size: int | None

    def __str__(self) -> str:
        size = "whole batches"
        if self.micro_batch_size is not None:
            size = f"micro-batches of {counted(self.micro_batch_size, 'sample')}"
        return f"trying {size} from the next step on: {self.reason} ({self.promise})"


class SkipStep(StepRefused):
    """Skip this batch and restore the state before it.

    `epoch` and `batch` identify the batch. Both are None if the guard does not count batches.
    """

    epoch: int | None = None
    batch: int | None = None

    def __str__(self) -> str:
        batch = "batch"
        if self.batch is not None:
            batch = name_of_batch(self.epoch, self.batch)
        return f"{batch} skipped: {self.reason} ({self.promise})"


class RollBack(StepRefused):
    """Restore the last good state.

    If `rewind_data` is true, the batches since that state are replayed. Otherwise, they are
    skipped.
    """

    rewind_data: bool
    epoch: int | None = None
    batch: int | None = None

    def __str__(self) -> str:
        start = "rolling back"
        if self.batch is not None:
            start += f" from {name_of_batch(self.epoch, self.batch)}"
        data = "skipping the batches since then"
        if self.rewind_data:
            data = "replaying the batches since then"
        return f"{start} to the last good state, {data}: {self.reason} ({self.promise})"


class Stop(StepRefused):
    """End the run because no remedy is left. `rule` is the rule id of the error to raise."""

    epoch: int | None = None
    batch: int | None = None
    rule: str | None = None

    def __str__(self) -> str:
        text = "stopping the run"
        if self.batch is not None:
            text += f" at {name_of_batch(self.epoch, self.batch)}"
        text += f": {self.reason}"
        if self.rule is not None:
            text += f" ({self.rule})"
        return text


def name_of_batch(epoch: int | None, batch: int) -> str:
    """Return a name such as "batch 7 of epoch 2", or "batch 7" if the epoch is unknown."""
    if epoch is None:
        return f"batch {batch}"
    return f"batch {batch} of epoch {epoch}"
