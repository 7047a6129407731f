"""Observe optimizers (steps, learning rates, losses, gradients) and learning rate schedulers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.learning.accumulation import AccumulationCheck
from holdfast.learning.layers import Gradients
from holdfast.learning.learning_rate import rate_of
from holdfast.learning.measurements import Measurements
from holdfast.learning.measures import append_bounded, streak
from holdfast.learning.observations import ObservedOptimizer, ObservedScheduler

# Number of sampled steps of each optimizer in which `AccumulationCheck` runs.
CHECKED_STEPS = 8
# Maximum number of losses to keep. If there are more, every second loss is dropped.
MAX_LOSSES = 800
# The history of gradient norms keeps the first norms, which show the start of training, and as many
# of the newest norms as fit into its maximum length.
FIRST_NORMS = 30
MAX_NORMS = 400
# A learning rate counts as practically 0, or as low, if it is below this fraction of the largest
# learning rate so far.
NO_RATE = 1e-7
LOW_RATE = 1e-3


class OptimizerObserver:
    """Observes one optimizer.

    Args:
        optimizer: The optimizer.
        owned: Ids of all parameters that are in an observed model.
    """

    def __init__(self, optimizer: Optimizer, owned: Collection[int]) -> None:
        self.optimizer = optimizer
        self.observed = ObservedOptimizer(kind=type(optimizer).__name__)
        self.observed.lr = self._learning_rate()
        self.observed.largest_lr = self.observed.lr
        # Losses of the backward passes since the last step.
        self.pending_losses: list[float] = []
        self._owned_at_start = {id(parameter) for parameter in self.parameters()} & set(owned)
        self._accumulation: AccumulationCheck | None = None
        # Only every `_loss_stride`-th loss is kept.
        self._loss_stride = 1
        self._losses_added = 0

    def open(self) -> None:
        """Start the accumulation check, unless it has run often enough."""
        if self._accumulation is None and self.observed.observed < CHECKED_STEPS:
            self._accumulation = AccumulationCheck(self.parameters())

    def close(self) -> None:
        """Remove the hooks of the accumulation check."""
        if self._accumulation is not None:
            self._accumulation.close()
            self._accumulation = None

    def parameters(self) -> list[nn.Parameter]:
        """Return the optimizer's current parameters."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _learning_rate(self) -> float:
        rates = [rate_of(group) for group in self.optimizer.param_groups]
        return max(rates, default=0.0)

    def measure_step(self, measurements: Measurements) -> None:
        """Count a step, and look at its learning rate, just before the optimizer steps."""
        numbers = []
        tensors = []
        for group in self.optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                # A scheduler changes the tensor in place.
                tensors.append(rate.detach().clone())
            else:
                numbers.append(rate_of(group))
        measurements.add(partial(self._note_step, numbers), *tensors)

    def _note_step(self, numbers: Sequence[float], *tensors: Tensor) -> None:
        observed = self.observed
        lr = max([*numbers, *map(float, tensors)], default=0.0)
        observed.steps += 1
        # Use the smaller of this rate and the previous one, to ignore a rate that was only used in
        # a single step: it was an accident, or the step was rolled back.
        observed.largest_lr = max(observed.largest_lr, min(lr, observed.lr))
        is_zero = lr <= NO_RATE * observed.largest_lr
        is_low = lr < LOW_RATE * observed.largest_lr
        observed.zero_lr_steps = streak(observed.zero_lr_steps, continues=is_zero)
        observed.low_lr_steps = streak(observed.low_lr_steps, continues=is_low)
        observed.lr = lr

    def measure_accumulation(self, measurements: Measurements) -> None:
        """Measure how the gradients of a sampled step were accumulated, if that is checked."""
        if self._accumulation is not None:
            self._accumulation.measure_step(measurements, self.observed)

    def forget_gradients(self) -> None:
        """Forget the gradients since the last step, which was undone."""
        if self._accumulation is not None:
            self._accumulation.forget()

    def note_gradients(self, gradients: Gradients) -> None:
        """Record the gradients that were measured just before a sampled step."""
        observed = self.observed
        observed.observed += 1
        has_gradient = gradients.tensors > 0
        is_zero = has_gradient and gradients.total_norm == 0
        if has_gradient:
            observed.with_gradient_steps += 1
        observed.no_gradient_steps = streak(observed.no_gradient_steps, continues=not has_gradient)
        observed.zero_gradient_steps = streak(observed.zero_gradient_steps, continues=is_zero)
        append_bounded(
            observed.gradient_norms, gradients.total_norm, first=FIRST_NORMS, most=MAX_NORMS
        )
        if gradients.nonfinite:
            observed.nonfinite_gradients += 1
            if observed.first_nonfinite_gradient is None:
                observed.first_nonfinite_gradient = observed.steps
            if not observed.nonfinite_names:
                observed.nonfinite_names = gradients.nonfinite

    def note_update(self, changed: int) -> None:
        """Record in how many parameters a step has changed weights."""
        if changed:
            self.observed.moved += 1

    def end_step(self, *, has_loss: bool) -> None:
        """Record the end of a step.

        Args:
            has_loss: Whether the caller records the loss with `add_loss`. If False, the loss of the
                last backward pass is recorded.
        """
        if self.pending_losses and not has_loss:
            self.add_loss(self.pending_losses[-1])
        self.pending_losses.clear()
        if self.observed.observed >= CHECKED_STEPS:
            self.close()

    def add_loss(self, value: float) -> None:
        """Record the loss of the current step. NaN and Inf are counted but not stored."""
        observed = self.observed
        if not math.isfinite(value):
            observed.nonfinite_losses += 1
            if observed.first_nonfinite_loss is None:
                observed.first_nonfinite_loss = observed.steps
            return
        self._losses_added += 1
        if self._losses_added % self._loss_stride == 0:
            observed.losses.append((observed.steps, value))
        if len(observed.losses) > MAX_LOSSES:
            observed.losses = observed.losses[::2]
            self._loss_stride *= 2

    def measure(self, measurements: Measurements, owned: Collection[int]) -> None:
        """Look at the parameters and settings as they are now.

        `observed` holds the result once it has been noted.

        Args:
            measurements: The measurements to add to.
            owned: Ids of all parameters that are in an observed model.
        """
        parameters = self.parameters()
        foreign = [parameter for parameter in parameters if id(parameter) not in owned]
        groups = self.optimizer.param_groups
        weight_decays = [float(group.get("weight_decay") or 0) for group in groups]
        facts = {
            "tensors": len(parameters),
            "frozen": sum(not parameter.requires_grad for parameter in parameters),
            "foreign": len(foreign),
            "foreign_with_gradient": sum(parameter.grad is not None for parameter in foreign),
            "replaced": sum(id(parameter) in self._owned_at_start for parameter in foreign),
            "maximize": bool(groups) and bool(groups[0].get("maximize", False)),
            "weight_decay": max(weight_decays, default=0.0),
        }
        measurements.add(partial(self._note_facts, facts))

    def _note_facts(self, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            setattr(self.observed, name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain data."""
        losses = self.observed.losses
        return {
            "steps": self.observed.steps,
            "loss_steps": [step for step, _ in losses],
            "losses": [loss for _, loss in losses],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.observed.steps = int(state["steps"])
        self.observed.losses = [
            (int(step), float(loss))
            for step, loss in zip(state["loss_steps"], state["losses"], strict=True)
        ]


class SchedulerObserver:
    """Observes one scheduler: a torch scheduler or any object that has ``last_epoch``."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._count_at_start = self._count()
        self._count_at_last_step = self._count_at_start
        self.observed = ObservedScheduler(
            kind=type(scheduler).__name__,
            patience=getattr(scheduler, "patience", None),
            period=_period_of(scheduler),
        )

    def _count(self) -> int:
        return int(getattr(self.scheduler, "last_epoch", 0))

    def measure_step(self, measurements: Measurements) -> None:
        """Record how often the scheduler was stepped since the previous optimizer step.

        Must be called before every optimizer step.
        """
        measurements.add(partial(self._note_step, self._count()))

    def _note_step(self, count: int) -> None:
        advances = count - self._count_at_last_step
        if self.observed.optimizer_steps == 0:
            self.observed.before_first = advances
        elif advances == 1:
            self.observed.advanced_once += 1
        elif advances > 1:
            self.observed.advanced_several += 1
        self.observed.optimizer_steps += 1
        self.observed.advanced = count - self._count_at_start
        self._count_at_last_step = count


def _period_of(scheduler: Any) -> int | None:
    """Return a scheduler's ``T_max`` or ``step_size``, in scheduler steps; None without either."""
    period = getattr(scheduler, "T_max", None) or getattr(scheduler, "step_size", None)
    return period if isinstance(period, int) else None
