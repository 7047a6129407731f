"""How an attempt and a step ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from holdfast.core.events import Decision
from holdfast.guard.result import StepResult
from holdfast.numerics.gradients import GradientFacts, Group
from holdfast.numerics.provenance import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt that came through, not yet committed.

    Args:
        loss: Mean over the items, shape ``()``, detached.
        items: Number of items.
        micro_batch_size: Most samples in one pass, None if unknown.
        groups: Parameter groups with their gradients.
        facts: About the gradients.
        norms: Of each gradient.
        dropped: Ranges of samples in the batch whose micro-batch had a loss of NaN or Inf and was left out.
    """

    loss: torch.Tensor
    items: float | torch.Tensor
    micro_batch_size: int | None
    groups: list[Group]
    facts: GradientFacts
    norms: torch.Tensor
    dropped: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What is thought of an attempt with finite values, before it is committed.

    Args:
        decision: Why it must not be committed, or None.
        max_norm: What its gradient norm is to be scaled down to, or None.
    """

    decision: Decision | None = None
    max_norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where NaN or Inf came from, as far as a replay has shown.

    Args:
        origin: The operation, parameter or input; None if it is not known.
        samples: Positions in the batch without which the step is sound; empty if there are none such.
        problem: Why there is no origin; empty if there is one.
    """

    origin: Origin | None = None
    samples: tuple[int, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a step ended.

    Args:
        attempt: The attempt that was committed or skipped.
        attempts: Attempts made.
        out_of_memory: How many of them ran out of memory.
        size: Samples in the batch, None if unknown.
        committed: False if it left no trace.
        culprits: Names of parameters with non-finite gradients, some of them.
        culprit_count: How many there are.
        loss_scale: For a step of fp16 that was skipped although its loss is finite, the scale that is tried next.
        decision: Why finite values were not committed.
        provenance: Where non-finite values came from.
        dropped: Positions in the batch of the samples that the committed step was made without.
    """

    attempt: Attempt
    attempts: int
    out_of_memory: int
    size: int | None
    committed: bool
    culprits: list[str] = field(default_factory=list)
    culprit_count: int = 0
    loss_scale: float | None = None
    decision: Decision | None = None
    provenance: Provenance | None = None
    dropped: tuple[int, ...] = ()

    def result(self, reason: str | None) -> StepResult:
        """Return what the caller of a step gets; `reason` says why it was skipped, None that it was not."""
        return StepResult(
            loss=self.attempt.loss,
            items=self.attempt.items,
            grad_norm=self.attempt.facts.norms,
            micro_batch_size=self.attempt.micro_batch_size,
            attempts=self.attempts,
            skipped=reason is not None,
            reason=reason,
            dropped_samples=() if reason is not None else self.dropped or tuple(self._left_out()),
        )

    def _left_out(self) -> Iterator[int]:
        """Yield the samples of micro-batches whose loss was NaN or Inf."""
        for first, end in self.attempt.dropped:
            yield from range(first, end)


class PartialOptimizerStep(Exception):  # noqa: N818 - a signal to the guard, never seen by users
    """An optimizer ran out of memory half-way: weights and moments cannot be trusted."""

    def __init__(self, why: str, outcome: Outcome) -> None:
        super().__init__(why)
        self.outcome = outcome
