"""The results of one attempt and one step, and the totals of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from holdfast.core.containers import check_count
from holdfast.core.events.decisions import Decision
from holdfast.numerics.gradients import GradientFacts, Group
from holdfast.numerics.provenance import Origin


class PassResult(NamedTuple):
    """What the forward and backward passes over a batch have returned."""

    # Mean over the items, shape ``()``, detached. For a loss with several terms, the sum of their
    # means.
    loss: torch.Tensor
    # The number of items averaged over. For a loss with several terms, that of the first term.
    items: float | torch.Tensor
    # ``(start, end)`` of the samples whose micro-batch had a loss of NaN or Inf.
    dropped: tuple[tuple[int, int], ...] = ()
    # Whether the number of items must be whole.
    counted: bool = False
    # What the loss function returned in addition to the loss.
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one ``guard.step`` did.

    Args:
        loss: Mean loss over the items of the batch, shape ``()``, detached, on the model's device.
            Reading it with ``float(...)`` synchronizes with the device; returning it does not.
        items: Number of items averaged over: the number that the loss function returned, or the
            number of samples if it returned none.
        grad_norm: L2 norm by parameter group before clipping, under names such as
            ``"optimizer.0"``. Empty if the step was skipped before gradients were measured.
        micro_batch_size: Most samples in one forward/backward pass; None if the batch has no batch
            dimension.
        attempts: How often the step was attempted, including the successful attempt.
        skipped: True if the weights do not contain this batch: they are unchanged, or the run has
            returned to an earlier state. `reason` says which.
        reason: Why the step was skipped and what was done about it, or None.
        dropped_samples: Positions in the batch of the samples that were left out of the step,
            because NaN or Inf came from them (``Policy.drop_nonfinite_samples``) or from their
            micro-batch.
        extra: The ``extra`` argument of `Loss`, detached. If the batch was split, tensors with a
            row for each sample are concatenated, numbers are averaged over the samples, and
            anything else becomes a list.
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
    """An attempt at a step that is complete but not committed yet."""

    # Mean over the items, shape ``()``, detached.
    loss: torch.Tensor
    # The number of items averaged over.
    items: float | torch.Tensor
    # Most samples in one pass, or None if unknown.
    micro_batch_size: int | None
    # The parameter groups, each with those of its parameters that have gradients.
    groups: list[Group]
    facts: GradientFacts
    # The norm of each gradient.
    norms: torch.Tensor
    # ``(start, end)`` of the samples whose micro-batch had a loss of NaN or Inf.
    dropped: tuple[tuple[int, int], ...] = ()
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where NaN or Inf came from, as far as a replay could show."""

    # The operation, parameter or input, or None if it is not known.
    origin: Origin | None = None
    # Positions in the batch of the samples without which the step is sound, if there are any.
    samples: tuple[int, ...] = ()
    # Why there is no origin; empty if there is one.
    problem: str = ""
    # The rank or ranks on which it appeared; empty with a single process.
    where: str = ""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a step ended."""

    # The attempt that was committed or skipped.
    attempt: StepAttempt
    attempts: int
    # How many of the attempts ran out of memory.
    out_of_memory: int
    # Samples in the batch, or None if unknown.
    size: int | None
    # False if everything that the step changed was restored.
    committed: bool
    # Names of some of the parameters with non-finite gradients.
    culprits: list[str] = field(default_factory=list)
    # The number of parameters with non-finite gradients.
    culprit_count: int = 0
    # In fp16, the loss scale of the next step, after a step that was skipped with a finite loss.
    loss_scale: float | None = None
    # Why finite values were not committed.
    decision: Decision | None = None
    # Where non-finite values came from.
    provenance: Provenance | None = None
    # Positions in the batch of the samples that were left out of the committed step.
    dropped: tuple[int, ...] = ()

    def result(self, reason: str | None) -> StepResult:
        """Return the result for the caller of the step.

        Args:
            reason: Why the step was skipped, or None if it was not.
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
    """An optimizer ran out of memory in its step, so weights and moments cannot be trusted."""

    def __init__(self, why: str, outcome: Outcome) -> None:
        super().__init__(why)
        self.outcome = outcome


@dataclass(slots=True, kw_only=True)
class Counters:
    """Running totals of a run over all its restarts; part of every checkpoint."""

    steps: int = 0
    skipped_steps: int = 0
    out_of_memory: int = 0
    rollbacks: int = 0
    resumes: int = 0
    nonfinite_in_a_row: int = 0
    spikes_in_a_row: int = 0
    rollbacks_in_a_row: int = 0
    # From this global step on, `rollbacks_in_a_row` starts again from 0.
    row_ends_at: int = 0
    # Epochs that were completed at the last call of `Guard.validated`.
    epochs_validated: int = 0

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the totals in a checkpoint. Counters that it lacks start at 0."""
        restored = Counters(**{name: check_count(value) for name, value in saved.items()})
        for counter in fields(self):
            setattr(self, counter.name, getattr(restored, counter.name))

    def note_out_of_memory(self, attempts: int = 1) -> None:
        """Count attempts that ran out of memory."""
        self.out_of_memory += attempts

    def note_skipped_step(self) -> None:
        """Count a step that was skipped."""
        self.skipped_steps += 1

    def note_spike(self) -> None:
        """Count a step that was refused because its loss or gradient norm stood out."""
        self.spikes_in_a_row += 1

    def note_nonfinite(self) -> None:
        """Count a step that was refused because of NaN or Inf."""
        self.nonfinite_in_a_row += 1

    def note_resume(self) -> None:
        """Count a resume from a checkpoint."""
        self.resumes += 1

    def note_validation(self, epochs: int) -> None:
        """Note how many epochs were complete when a metric was reported."""
        self.epochs_validated = epochs

    def end_rows(self) -> None:
        """Start all rows of failures again from 0."""
        self.nonfinite_in_a_row = 0
        self.spikes_in_a_row = 0
        self.rollbacks_in_a_row = 0

    def note_good_step(self, global_step: int) -> None:
        """Count a committed step; far enough after a rollback, it ends a row of rollbacks."""
        self.steps += 1
        self.nonfinite_in_a_row = 0
        self.spikes_in_a_row = 0
        if global_step >= self.row_ends_at:
            self.rollbacks_in_a_row = 0

    def note_rollback(self, from_step: int, beyond: int) -> None:
        """Count a return to an earlier state.

        Good steps before the one that failed prove nothing: they were good the first time too.

        Args:
            from_step: The step that failed.
            beyond: The run must get this many steps past it to end the row of rollbacks.
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
        global_step: Optimizer steps that went into the weights.
        epoch: Epochs completed.
        steps: Steps committed over all restarts, including those that a rollback undid.
        skipped_steps: Steps that were skipped because of NaN or Inf.
        out_of_memory: Attempts that ran out of memory.
        rollbacks: Returns to a checkpoint.
        resumes: How often a new process continued the run from a checkpoint.
        checkpoints_saved: Checkpoints saved by this process.
        checkpoints_failed: Failed saves of this process.
        micro_batch_size: Most samples in one forward/backward pass of the next step; None for the
            whole batch.
        recompute: Whether activation checkpointing is on.
        loss_scale: The loss scale in fp16 training, else None.
    """

    global_step: int
    epoch: int
    steps: int
    skipped_steps: int
    out_of_memory: int
    rollbacks: int
    resumes: int
    checkpoints_saved: int
    checkpoints_failed: int
    micro_batch_size: int | None
    recompute: bool
    loss_scale: float | None = None
