"""How an attempt and a step ended, and the totals of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from holdfast.core.events.event import Decision
from holdfast.numerics.gradients import GradientFacts, Group
from holdfast.numerics.provenance import Origin


class Passed(NamedTuple):
    """What a batch has given."""

    # Mean over the items, shape ``()``, detached; of several terms, the sum of their means
    loss: torch.Tensor
    items: float | torch.Tensor  # what it is over; of several terms, those of the first
    # ``(start, end)`` of samples whose part had a loss of NaN or Inf
    dropped: tuple[tuple[int, int], ...] = ()
    counted: bool = False  # whether the items must be whole
    extra: Mapping[str, Any] | None = None  # what the loss function has returned beside the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one ``guard.step`` did.

    Args:
        loss: Mean loss over the items of the batch, shape ``()``, detached, on the model's device.
            Reading it with ``float(...)`` is the caller's sync, not ours.
        items: Loss-bearing items that the mean is over: as returned by the loss function, else
            samples.
        grad_norm: L2 norm by parameter group before clipping, under names such as
            ``"optimizer.0"``. Empty if the step was skipped before gradients were measured.
        micro_batch_size: Most samples in one forward/backward; None if the batch has no batch
            dimension.
        attempts: Attempts made, the successful one included.
        skipped: True if this batch is not in the weights: they were left as they were, or the run
            has returned to a checkpoint, as `reason` says.
        reason: Why it was skipped, and what was done; else None.
        dropped_samples: Positions in the batch of the samples that the step was made without, since
            NaN or Inf came from them (``Policy.drop_nonfinite_samples``), or from the micro-batch
            that they were in.
        extra: What `Loss` was given as ``extra``, detached. Of a batch in parts: tensors with a row
            for each sample are concatenated, numbers are averaged over the samples, of all else
            there is a list.
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
class Attempt:
    """An attempt that came through, not yet committed."""

    loss: torch.Tensor  # mean over the items, shape ``()``, detached
    items: float | torch.Tensor
    micro_batch_size: int | None  # most samples in one pass, None if unknown
    groups: list[Group]  # with their gradients
    facts: GradientFacts
    norms: torch.Tensor  # of each gradient
    dropped: tuple[tuple[int, int], ...] = ()  # samples whose micro-batch had a loss of NaN or Inf
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where NaN or Inf came from, as far as a replay has shown."""

    origin: Origin | None = None  # the operation, parameter or input; None if it is not known
    # Positions in the batch without which the step is sound, if there are such
    samples: tuple[int, ...] = ()
    problem: str = ""  # why there is no origin; empty if there is one
    where: str = ""  # the rank or ranks that it came up on; empty in a process that trains alone


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a step ended."""

    attempt: Attempt  # the attempt that was committed or skipped
    attempts: int
    out_of_memory: int  # how many of them ran out of memory
    size: int | None  # samples in the batch, None if unknown
    committed: bool  # False if it left no trace
    # Names of parameters with non-finite gradients, some of them
    culprits: list[str] = field(default_factory=list)
    culprit_count: int = 0  # how many there are
    # Of fp16, what is tried next after a skip although the loss is finite
    loss_scale: float | None = None
    decision: Decision | None = None  # why finite values were not committed
    provenance: Provenance | None = None  # where non-finite values came from
    # Positions in the batch of the samples that the committed step was made without
    dropped: tuple[int, ...] = ()

    def result(self, reason: str | None) -> StepResult:
        """Return what the caller of a step gets.

        `reason` says why it was skipped, None that it was not.
        """
        dropped = self.attempt.dropped
        left_out = (
            [place for first, end in dropped for place in range(first, end)] if dropped else ()
        )
        return StepResult(
            loss=self.attempt.loss,
            items=self.attempt.items,
            grad_norm=self.attempt.facts.norms,
            micro_batch_size=self.attempt.micro_batch_size,
            attempts=self.attempts,
            skipped=reason is not None,
            reason=reason,
            dropped_samples=() if reason is not None else self.dropped or tuple(left_out),
            extra=self.attempt.extra or {},
        )


class PartialOptimizerStep(Exception):  # noqa: N818 - a signal to the guard, never seen by users
    """An optimizer ran out of memory half-way: weights and moments cannot be trusted."""

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
    row_ends_at: int = 0  # global step from which a row of rollbacks is over
    epochs_validated: int = 0  # epochs that were completed when `Guard.validated` was called last

    def note_good_step(self, global_step: int) -> None:
        """Count a committed step.

        Getting far enough beyond the last rollback ends a row of them.
        """
        self.steps += 1
        self.nonfinite_in_a_row = self.spikes_in_a_row = 0
        if global_step >= self.row_ends_at:
            self.rollbacks_in_a_row = 0

    def note_rollback(self, from_step: int, beyond: int) -> None:
        """Count a return to an earlier state.

        A row of them ends `beyond` steps after the step that failed.

        Good steps before that place prove nothing: they were good the first time too.
        """
        self.rollbacks += 1
        self.rollbacks_in_a_row += 1
        self.row_ends_at = max(self.row_ends_at, from_step + beyond)
        self.nonfinite_in_a_row = self.spikes_in_a_row = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot of a run.

    Args:
        global_step: Optimizer steps in the weights.
        epoch: Epochs completed.
        steps: Steps committed over all restarts of the run, also those that a rollback undid.
        skipped_steps: Steps that left no trace because of NaN or Inf.
        out_of_memory: Attempts that ran out of memory.
        rollbacks: Returns to a checkpoint.
        resumes: Times that the run was continued from a checkpoint by a new process.
        checkpoints_saved: By this process.
        checkpoints_failed: By this process.
        micro_batch_size: Most samples in one forward/backward from the next step on; None: the
            whole batch.
        recompute: Whether activation checkpointing is on.
        loss_scale: Of fp16 training, else None.
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
