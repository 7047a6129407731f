"""The results of one attempt and one step, and the totals of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from holdfast.core.containers import check_count
from holdfast.core.events.decisions import Decision
from holdfast.numerics.gradients import GradientFacts, Group
from holdfast.numerics.provenance import Origin


class PassResult(NamedTuple):
    """The combined results of the forward and backward passes over one batch."""

    # The mean loss over the items, shape ``()``, detached. For a loss with several terms, the sum
    # of their means.
    loss: torch.Tensor
    # The number of items in the mean, or in the first term's mean if the loss has several terms.
    items: float | torch.Tensor
    # The positions ``(start, end)`` of the samples in each micro-batch whose loss was NaN or Inf.
    dropped: tuple[tuple[int, int], ...] = ()
    # Whether the number of items is a count and must therefore be a whole number.
    counted: bool = False
    # Values that the loss function returned in addition to the loss.
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one call to ``guard.step``.

    Args:
        loss: The mean loss over the items of the batch, shape ``()``, detached, on the model's
            device. Reading it with ``float(...)`` synchronizes with the device.
        items: The number of items in the mean. This is the number that the loss function returned,
            or the number of samples if it returned none.
        grad_norm: The L2 norm of each parameter group's gradients before clipping, keyed by names
            such as ``"optimizer.0"``. Empty if the step was skipped before the norms were computed.
        micro_batch_size: The largest number of samples in one forward and backward pass. None if
            the batch has no batch dimension.
        attempts: The number of attempts at the step, including the successful one.
        skipped: True if the weights do not include this batch, because they are unchanged or the
            run has rolled back. `reason` states which of the two happened.
        reason: Why the step was skipped and how the guard reacted. None if it was not skipped.
        dropped_samples: The positions in the batch of the samples that were left out of the step,
            because they (``Policy.drop_nonfinite_samples``) or their micro-batch caused NaN or Inf.
        extra: The ``extra`` argument of `Loss`, detached. If the batch was split, tensors with a
            row for each sample are concatenated, numbers are averaged over the samples, and all
            other values are collected in lists.
    """

    loss: torch.Tensor
    items: float | torch.Tensor
    grad_norm: Mapping[str, float]
    micro_batch_size: int | None
    attempts: int
    skipped: bool
    reason: str | None
    dropped_samples: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class StepAttempt:
    """The result of an attempt whose backward pass is complete, before the step is committed."""

    # The mean loss over the items, shape ``()``, detached.
    loss: torch.Tensor
    # The number of items in the mean.
    items: float | torch.Tensor
    # The largest number of samples in one pass, or None if unknown.
    micro_batch_size: int | None
    # The parameter groups, each reduced to the parameters that have gradients.
    groups: list[Group]
    facts: GradientFacts
    # The norm of each gradient, in the order of the parameters in `groups`.
    norms: torch.Tensor
    # The positions ``(start, end)`` of the samples in each micro-batch whose loss was NaN or Inf.
    dropped: tuple[tuple[int, int], ...] = ()
    extra: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        passed: PassResult,
        groups: list[Group],
        facts: GradientFacts,
        norms: torch.Tensor,
        micro_batch_size: int | None,
    ) -> StepAttempt:
        """Combine the results of the passes with the facts about their gradients."""
        return cls(
            loss=passed.loss,
            items=passed.items,
            micro_batch_size=micro_batch_size,
            groups=groups,
            facts=facts,
            norms=norms,
            dropped=passed.dropped,
            extra=passed.extra,
        )

    @classmethod
    def failed(cls, loss: torch.Tensor) -> StepAttempt:
        """Return an attempt that has failed on this rank, so that its gradients are unknown.

        Args:
            loss: The mean loss of the ranks that have computed theirs, shape ``()``.
        """
        facts = GradientFacts(
            norms={}, total=math.nan, loss=math.nan, overflowed=False, nonfinite=True
        )
        return cls(
            loss=loss,
            items=math.nan,
            micro_batch_size=None,
            groups=[],
            facts=facts,
            norms=loss.new_empty(0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of NaN or Inf in a step, as far as a replay of the step could determine it."""

    # The operation, parameter or input where NaN or Inf first appeared. None if unknown.
    origin: Origin | None = None
    # The positions in the batch of the samples that cause NaN or Inf. The step is finite without
    # these samples.
    samples: tuple[int, ...] = ()
    # Why the origin is unknown. Empty if it is known.
    problem: str = ""
    # The rank or ranks where NaN or Inf appeared. Empty with a single process.
    where: str = ""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a step ended."""

    # The attempt that was committed or skipped.
    attempt: StepAttempt
    attempts: int
    # The number of attempts that ran out of memory.
    out_of_memory: int
    # The number of samples in the batch, or None if unknown.
    size: int | None
    # False if the step was undone completely.
    committed: bool
    # The names of some parameters with non-finite gradients.
    culprits: list[str] = field(default_factory=list)
    # The number of parameters with non-finite gradients.
    culprit_count: int = 0
    # The new loss scale, if an fp16 step was skipped although its loss was finite.
    loss_scale: float | None = None
    # Why the step was not committed although its values were finite. None otherwise.
    decision: Decision | None = None
    # The origin of non-finite values. None if it was not searched for.
    provenance: Provenance | None = None
    # The positions in the batch of the samples that were left out of the committed step.
    dropped: tuple[int, ...] = ()

    def result(self, reason: str | None) -> StepResult:
        """Return the `StepResult` that ``guard.step`` returns to its caller.

        Args:
            reason: Why the step was skipped, or None if it was committed.
        """
        skipped = reason is not None
        return StepResult(
            loss=self.attempt.loss,
            items=self.attempt.items,
            grad_norm=self.attempt.facts.norms,
            micro_batch_size=self.attempt.micro_batch_size,
            attempts=self.attempts,
            skipped=skipped,
            reason=reason,
            dropped_samples=() if skipped else self._dropped_samples(),
            extra=self.attempt.extra or {},
        )

    def _dropped_samples(self) -> tuple[int, ...]:
        """Return the positions of the samples that were left out of the committed step."""
        if self.dropped:
            return self.dropped
        if not self.attempt.dropped:
            return ()
        return tuple(
            position for start, end in self.attempt.dropped for position in range(start, end)
        )


class PartialOptimizerStep(Exception):  # noqa: N818 - a signal to the guard, never seen by users
    """An optimizer ran out of memory during its step, so weights and moments may be corrupt."""

    def __init__(self, why: str, outcome: Outcome) -> None:
        super().__init__(why)
        self.outcome = outcome


@dataclass(slots=True, kw_only=True)
class Counters:
    """Running totals of a run over all its restarts. They are saved in every checkpoint."""

    steps: int = 0
    skipped_steps: int = 0
    out_of_memory: int = 0
    rollbacks: int = 0
    resumes: int = 0
    late_steps: int = 0
    repeated_late_steps: int = 0
    nonfinite_in_a_row: int = 0
    spikes_in_a_row: int = 0
    rollbacks_in_a_row: int = 0
    # The global step at which `rollbacks_in_a_row` is reset to 0.
    row_ends_at: int = 0
    # The number of epochs that were complete at the last call to `Guard.validated`.
    epochs_validated: int = 0

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the totals from a checkpoint. Counters missing from it are reset to 0."""
        restored = Counters(**{name: check_count(value) for name, value in saved.items()})
        for counter in fields(self):
            setattr(self, counter.name, getattr(restored, counter.name))

    def note_out_of_memory(self, attempts: int = 1) -> None:
        """Count attempts that ran out of memory."""
        self.out_of_memory += attempts

    def note_skipped_step(self) -> None:
        """Count a step that was skipped."""
        self.skipped_steps += 1

    def note_late_step(self, *, repeated: bool) -> None:
        """Count a step whose result was read one step later, and whether it was then repeated."""
        self.late_steps += 1
        if repeated:
            self.repeated_late_steps += 1

    def note_spike(self) -> None:
        """Count a step that was refused because its loss or gradient norm was unusually large."""
        self.spikes_in_a_row += 1

    def note_nonfinite(self) -> None:
        """Count a step that was refused because of NaN or Inf."""
        self.nonfinite_in_a_row += 1

    def note_resume(self) -> None:
        """Count a resume from a checkpoint."""
        self.resumes += 1

    def note_validation(self, epochs: int) -> None:
        """Store how many epochs were complete when a metric was reported."""
        self.epochs_validated = epochs

    def end_rows(self) -> None:
        """Reset all counts of consecutive failures to 0."""
        self.nonfinite_in_a_row = 0
        self.spikes_in_a_row = 0
        self.rollbacks_in_a_row = 0

    def note_good_step(self, global_step: int) -> None:
        """Count a committed step, and reset the counts of consecutive failures.

        Args:
            global_step: The global step that includes the committed step.
        """
        self.steps += 1
        self.nonfinite_in_a_row = 0
        self.spikes_in_a_row = 0
        if global_step >= self.row_ends_at:
            self.rollbacks_in_a_row = 0

    def note_rollback(self, from_step: int, beyond: int) -> None:
        """Count a rollback.

        Repeating the steps before the failed one does not end a series of consecutive rollbacks,
        because those steps succeeded the first time too.

        Args:
            from_step: The global step at which the run failed.
            beyond: The number of steps past `from_step` after which the series ends.
        """
        self.rollbacks += 1
        self.rollbacks_in_a_row += 1
        self.row_ends_at = max(self.row_ends_at, from_step + beyond)
        self.nonfinite_in_a_row = 0
        self.spikes_in_a_row = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot of a run's totals.

    Args:
        global_step: The number of optimizer steps that have updated the weights.
        epoch: The number of completed epochs.
        steps: The number of steps committed over all restarts, including those that were later
            rolled back.
        skipped_steps: The number of steps that were refused because of NaN or Inf, or because the
            loss or gradient norm was unusually large.
        out_of_memory: The number of attempts that ran out of memory.
        rollbacks: The number of rollbacks.
        resumes: The number of times that a new process has resumed the run from a checkpoint.
        late_steps: The number of steps whose result was read one step later, over all restarts.
        repeated_late_steps: The number of late steps that the device has refused, so that they were
            repeated and decided before their optimizers ran. Some of them were then committed.
        checkpoints_saved: The number of checkpoints saved by this process.
        checkpoints_failed: The number of failed saves in this process.
        micro_batch_size: The largest number of samples in one forward and backward pass of the next
            step. None for the whole batch.
        recompute: Whether activation checkpointing is on.
        loss_scale: The loss scale in fp16 training, otherwise None.
    """

    global_step: int
    epoch: int
    steps: int
    skipped_steps: int
    out_of_memory: int
    rollbacks: int
    resumes: int
    late_steps: int
    repeated_late_steps: int
    checkpoints_saved: int
    checkpoints_failed: int
    micro_batch_size: int | None
    recompute: bool
    loss_scale: float | None = None
