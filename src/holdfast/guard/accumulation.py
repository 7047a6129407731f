"""Accumulate gradients for one optimizer step over batches that arrive one at a time.

Each batch is a transaction, and the last batch commits the whole step.

This is for frameworks that train on each batch as it arrives, so the batches cannot be collected
into a `Window` first. A batch that runs out of memory is retried or split without affecting the
gradients of earlier batches. If a batch yields NaN or Inf, the policy determines whether the whole
step is skipped or continues without the samples that caused NaN or Inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from holdfast.guard.hosted import HostedGuard
from holdfast.guard.result import StepResult
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.loader.random_state import RandomState, capture, restore
from holdfast.loader.splitting import Split


class Accumulation:
    """Accumulates gradients over the batches of one optimizer step.

    The accumulated gradients are kept in addition to those of the current batch, so a step needs
    memory for two copies of the gradients.

    Args:
        guard: The guard. Once this object exists, no other code may call ``guard.step``.
    """

    def __init__(self, guard: HostedGuard) -> None:
        self._guard = guard
        self._steps = guard.steps
        self._engine = guard.steps.engine
        self._attempts = guard.steps.engine.attempts
        # The accumulated gradients of earlier batches, without loss scaling.
        self._gradients = guard.steps.engine.earlier_gradients
        self._gradients.discard()
        # Copies of the buffers, made before the first batch of the step.
        self._buffers = self._attempts.safety.loss_calls.new_keeper()
        # The random state before the first batch of the step. None between two steps.
        self._begun: RandomState | None = None
        # Why the step will be skipped once its last batch arrives. None if it will be committed.
        self._spoiled: str | None = None

    @property
    def attempt(self) -> int | None:
        """Return the unique number of the current attempt, or None outside an attempt.

        If it is None while the loss function is running, the guard is testing whether the batch can
        be split, or is replaying the step to find the cause of a failure.
        """
        return self._attempts.current

    @property
    def pending(self) -> bool:
        """Return whether a step has begun and not yet received its last batch.

        If so, a checkpoint saved now must include `state_dict`.
        """
        return self._begun is not None

    def show(self) -> None:
        """Set each parameter's ``grad`` to its accumulated gradient, for code that reads it."""
        self._gradients.show()

    def forget(self) -> None:
        """Discard the accumulated gradients. The next batch then starts a new step."""
        self._gradients.discard()
        self._begun = None
        self._spoiled = None

    # --- checkpoints

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the unfinished step, or None between two steps."""
        if self._begun is None:
            return None
        gradients = {
            name: gradient
            for name, parameter in self._named_parameters()
            if (gradient := self._gradients.get(parameter)) is not None
        }
        return {
            "gradients": gradients,
            "buffers": self._buffers.captured(),
            "random_state": self._begun.to_tree(),
            "spoiled": self._spoiled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a step that was unfinished when its state was saved.

        The models' parameters and buffers must have the values that they had at the time of saving.

        Args:
            state: The value that `state_dict` returned.
        """
        gradients = state["gradients"]
        self._gradients.hold(
            {
                parameter: gradients[name].to(parameter.device)
                for name, parameter in self._named_parameters()
                if name in gradients
            }
        )
        self._buffers.capture(state["buffers"])
        self._begun = RandomState.from_tree(state["random_state"])
        self._spoiled = state["spoiled"]

    def _named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for model_name, model in self._steps.parts.models.items():
            for name, parameter in model.named_parameters():
                yield f"{model_name}.{name}", parameter

    # --- batches

    def add(
        self,
        batch: Any,
        loss_fn: LossFunction,
        *,
        optimizer: Sequence[str] | None = None,
        split: Split | None = None,
    ) -> StepResult:
        """Add a batch's gradient to the accumulated gradients.

        If an error is raised, the gradients of earlier batches remain unchanged. The arguments are
        those of `Guard.step`.

        Returns:
            The result for this batch. If its gradient contains NaN or Inf, ``skipped`` is True, and
            the whole step will be skipped.

        Raises:
            HoldfastError: For the same reasons as `Guard.step`.
        """
        if self._begun is None:
            self._begin_step()
        session = self._steps.session
        recovery = self._steps.recovery
        rollbacks = session.counters.rollbacks

        names = self._steps.parts.optimizer_names(optimizer)
        work = self._engine.begin(batch, loss_fn, names, split)
        attempt = self._engine.attempt(work)
        session.counters.note_out_of_memory(work.out_of_memory)
        if not attempt.facts.nonfinite:
            gradients, outcome = self._engine.keep(work, attempt)
            self._gradients.hold(gradients)
            return outcome.result(None)

        outcome = self._engine.skip(work, attempt)
        finite_batch = self._engine.without_bad_samples(work, outcome)
        if finite_batch is not None:
            recovery.samples.report_dropped_samples(outcome, batch)
            return self.add(finite_batch, loss_fn, optimizer=optimizer, split=split)
        self._spoiled = recovery.after_refused_step(outcome, batch)
        if session.counters.rollbacks != rollbacks:
            # The run has rolled back to other weights, so the accumulated gradients are outdated.
            self._gradients.discard()
        return outcome.result(self._spoiled)

    def _begin_step(self) -> None:
        """Copy the state that must be restored if the step is skipped."""
        self._guard.ready()
        self._begun = capture(self._steps.parts.devices())
        self._buffers.capture()

    def step(
        self,
        batch: Any,
        loss_fn: LossFunction,
        *,
        optimizer: Sequence[str] | None = None,
        split: Split | None = None,
    ) -> StepResult:
        """Complete the step with its last batch; see `Guard.step`.

        If the step is skipped because of this batch or an earlier one, the buffers and the random
        state from before the first batch are restored.
        """
        try:
            if self._spoiled is None:
                result = self._guard.step(batch, loss_fn, optimizer=optimizer, split=split)
            else:
                result = self.add(batch, loss_fn, optimizer=optimizer, split=split)
                result = replace(result, skipped=True, reason=result.reason or self._spoiled)
            if self._begun is not None:
                self._end_step(self._begun, skipped=result.skipped)
        finally:
            self.forget()
        return result

    def _end_step(self, begun: RandomState, *, skipped: bool) -> None:
        if skipped:
            self._buffers.restore()
            restore(begun)
        else:
            self._buffers.learn()


class _Divided(torch.autograd.Function):
    """Returns its input unchanged, but divides the gradient by a number."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, count: int) -> torch.Tensor:
        ctx.count = count
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / ctx.count, None


def divided(loss: torch.Tensor, count: int) -> torch.Tensor:
    """Return the same loss, with its gradient divided by the number of batches in a step.

    The value does not change, so the guard records the loss as the loss function returned it.

    Args:
        loss: The loss of one batch, shape ``()``.
        count: The number of batches in a step.
    """
    if count == 1:
        return loss
    result: torch.Tensor = _Divided.apply(loss, count)  # type: ignore[no-untyped-call]
    return result
