"""One optimizer step over batches that come one by one.

Each is a transaction, and the last one commits them all.

For frameworks that show every batch while it is trained, so that a `Window` cannot wait for its
last one. A batch that ran out of memory is made again or cut, without touching the gradients of
those before it; one with NaN or Inf has the whole step skipped, or goes on without the samples that
it came from, as the policy says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from holdfast.guard.hosted import HostedGuard
from holdfast.guard.result import StepResult
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.loader.random_state import RandomState, capture, restore
from holdfast.loader.splitting import Split


class Accumulation:
    """Gradients that are kept between the batches of one step.

    One more copy of them while there are some to keep.

    `begins` is called at the beginning of each attempt, to put back what an earlier one has changed
    outside. The guard should be stepped by this object from now on.
    """

    def __init__(self, guard: HostedGuard, begins: Callable[[], None] = lambda: None) -> None:
        self._guard = guard
        self._steps = guard.steps
        self._engine = guard.steps.engine
        self._attempts = guard.steps.engine.attempts
        self._begins = begins
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        # As they were before the first batch of a step
        self._buffers = self._attempts.safety.keeper()
        self._begun: RandomState | None = None  # the random state of then
        self._spoiled: str | None = None  # why the step will be skipped
        self._observing = self._attempts.observing
        self._attempts.observing = self._attempt
        self.attempting = False
        """Whether an attempt is being made.

        Not a trial of a cut, and not a replay that looks for a cause.
        """

    @property
    def pending(self) -> bool:
        """Return whether a step has begun.

        A checkpoint taken now is whole only with `state_dict`.
        """
        return self._begun is not None

    def kept(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are kept for the next step."""
        return list(self._kept)

    def forget(self) -> None:
        """Drop what is kept: the next batch is the first of a step."""
        self._kept, self._begun, self._spoiled = {}, None, None

    def state_dict(self) -> dict[str, Any] | None:
        """Return what the batches of a step that is not made yet have left.

        None between two steps.
        """
        if self._begun is None:
            return None
        return {
            "gradients": {name: self._kept[p] for name, p in self._named() if p in self._kept},
            "buffers": self._buffers.copies(),
            "random_state": self._begun.to_tree(),
            "spoiled": self._spoiled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the middle of a step.

        Parameters and buffers are those of the moment it was left.
        """
        found = state["gradients"]
        self._kept = {p: found[name].to(p.device) for name, p in self._named() if name in found}
        self._buffers.keep(state["buffers"])
        self._begun, self._spoiled = RandomState.from_tree(state["random_state"]), state["spoiled"]

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for model_name, model in self._steps.parts.models.items():
            yield from ((f"{model_name}.{name}", each) for name, each in model.named_parameters())

    def show(self) -> None:
        """Let the parameters have the gradients that are kept, for whoever looks at them."""
        for parameter, kept in self._kept.items():
            parameter.grad = kept

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        self._begins()
        self.attempting = True
        try:
            with self._observing() or contextlib.nullcontext():
                yield
        finally:
            self.attempting = False
        for parameter, kept in self._kept.items():
            # In fp16 the new gradients are scaled; else as it is
            kept = self._attempts.loss_scale.scale(kept)
            if parameter.grad is None:
                parameter.grad = kept.clone()
            elif parameter.grad.layout != kept.layout:
                parameter.grad = parameter.grad + kept
            else:
                parameter.grad.add_(kept)

    def add(
        self,
        batch: Any,
        loss_fn: LossFunction,
        *,
        optimizer: Sequence[str] | None = None,
        split: Split | None = None,
    ) -> StepResult:
        """Add the gradient of a batch to those that are kept.

        ``skipped`` if it is NaN or Inf, and so the whole step.

        What it raises is that of `Guard.step`; what was kept before stays.
        """
        session, engine, recovery = self._steps.session, self._engine, self._steps.recovery
        if self._begun is None:
            self._guard.ready()
            self._begun = capture(self._steps.parts.devices())
            self._buffers.keep()
        returns = session.counters.rollbacks
        work = engine.begin(batch, loss_fn, self._steps.parts.optimizer_names(optimizer), split)
        attempt = engine.attempt(work)
        session.counters.out_of_memory += work.out_of_memory
        if not attempt.facts.nonfinite:
            self._kept, outcome = engine.keep(work, attempt)
            return outcome.result(None)
        outcome = engine.skip(work, attempt)
        less = engine.without_bad_samples(work, outcome)
        if less is not None:
            recovery.dropped(outcome, batch)
            return self.add(less, loss_fn, optimizer=optimizer, split=split)
        self._spoiled = recovery.after_refused_step(outcome, batch)
        if session.counters.rollbacks != returns:
            self._kept = {}  # they are gradients of other weights
        return outcome.result(self._spoiled)

    def step(
        self,
        batch: Any,
        loss_fn: LossFunction,
        *,
        optimizer: Sequence[str] | None = None,
        split: Split | None = None,
    ) -> StepResult:
        """Make the step, with this batch as the last one; see `Guard.step`.

        If it is skipped, or a batch before was, buffers and random state are as before the first of
        them.
        """
        try:
            if self._spoiled is None:
                result = self._guard.step(batch, loss_fn, optimizer=optimizer, split=split)
            else:
                result = self.add(batch, loss_fn, optimizer=optimizer, split=split)
                result = replace(result, skipped=True, reason=result.reason or self._spoiled)
            if self._begun is not None:
                if result.skipped:
                    self._buffers.put_back()
                    restore(self._begun)
                else:
                    self._buffers.learn()
        finally:
            self.forget()
        return result


class _Divided(torch.autograd.Function):
    """The identity, with its gradient divided."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, count: int) -> torch.Tensor:
        ctx.count = count
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / ctx.count, None


def divided(loss: torch.Tensor, count: int) -> torch.Tensor:
    """Return a loss of the same value, shape ``()``, whose gradient is divided by the batches of a
    step.

    So a guard sees the loss as it was returned.
    """
    found: torch.Tensor = loss if count == 1 else _Divided.apply(loss, count)  # type: ignore[no-untyped-call]
    return found
