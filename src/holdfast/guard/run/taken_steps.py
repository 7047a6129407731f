"""Record the steps that a loop takes itself, once their losses and gradient norms are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from holdfast.core.events import run_events
from holdfast.guard.run.session import Session
from holdfast.memory.host_copy import HostCopy
from holdfast.numerics.gradients import total_norm
from holdfast.numerics.spikes import Level
from holdfast.recorder.black_box import StepMark


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenStep:
    """A step that has been taken, and whose values may not have reached the host yet."""

    optimizer: str
    # None if the loop did not call ``backward`` on a loss.
    loss: HostCopy | None
    # The norm of all gradients. None if it is unknown, for example because the optimizer computes
    # the gradients during its step, with a closure.
    grad_norm: HostCopy | None
    # Whether a fused optimizer skips the step on the device if ``GradScaler`` has found Inf.
    may_be_skipped: bool
    seconds: float

    @property
    def is_complete(self) -> bool:
        """Return whether all values can be read without waiting."""
        values = (self.loss, self.grad_norm)
        return all(value is None or value.is_complete for value in values)


class TakenSteps:
    """Records steps that have been taken, and reports NaN, Inf and spikes in them.

    Args:
        session: The session of the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._record = session.record
        self._has_one_optimizer = len(session.parts.optimizers) == 1
        # The newest step, until it is recorded.
        self._newest: TakenStep | None = None
        # Whether the newest recorded step had NaN or Inf.
        self._was_nonfinite = False

    @property
    def are_recorded(self) -> bool:
        """Return whether the newest step has been recorded, so that `flush` does nothing."""
        return self._newest is None

    def add(self, step: TakenStep) -> None:
        """Record a step now if its values are known, otherwise in the next `flush`."""
        self._newest = step
        if step.is_complete:
            self.flush()

    def flush(self) -> None:
        """Record the newest step, and wait for its loss and gradient norm if necessary."""
        step = self._newest
        if step is None:
            return
        self._newest = None
        loss = None if step.loss is None else float(step.loss.read())
        norm = None if step.grad_norm is None else float(step.grad_norm.read())
        self._record.step(
            StepMark.COMMITTED,
            None,
            loss,
            norm,
            step.seconds,
            "" if self._has_one_optimizer else step.optimizer,
        )
        if not step.may_be_skipped:
            self._report_nonfinite(step.optimizer, loss, norm)
        if loss is not None and norm is not None and math.isfinite(loss) and math.isfinite(norm):
            self._report_spike(step.optimizer, loss, norm)

    def _report_nonfinite(self, optimizer: str, loss: float | None, norm: float | None) -> None:
        """Report the first of consecutive steps with NaN or Inf."""
        is_nonfinite = any(value is not None and not math.isfinite(value) for value in (loss, norm))
        if is_nonfinite and not self._was_nonfinite:
            self._record.emit(
                run_events.NonfiniteStepTaken(optimizer=optimizer, loss=loss, grad_norm=norm)
            )
        self._was_nonfinite = is_nonfinite

    def _report_spike(self, optimizer: str, loss: float, norm: float) -> None:
        """Compare a step with earlier ones, and report it if it is unusual."""
        if self._session.policy.spike_action == "off":
            return
        spikes = self._session.spikes
        level = spikes.judge(optimizer, loss, norm)
        if level is not Level.CALM:
            spike = run_events.Spike(
                loss=loss,
                grad_norm=norm,
                usual_norm=spikes.usual_norm(optimizer),
                level=level.name,
            )
            self._record.emit(spike)
        spikes.accepted(optimizer, loss, norm)


def norm_of_gradients(optimizer: Optimizer) -> HostCopy | None:
    """Return the norm of all gradients of an optimizer, or None if it is unknown."""
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    # The norm without the sparse gradients would not be comparable to anything.
    if not gradients or any(gradient.layout is not torch.strided for gradient in gradients):
        return None
    try:
        norm = total_norm(gradients).detach()
        # A `GradScaler` leaves it to fused optimizers to divide the gradients by its scale.
        scale = getattr(optimizer, "grad_scale", None)
        if isinstance(scale, torch.Tensor):
            norm = norm / scale.to(norm.device, non_blocking=True)
    except RuntimeError:
        # The norm is only reported, so a tensor type without it must not end the script.
        return None
    return copy_to_host(norm)


def copy_to_host(value: torch.Tensor | None) -> HostCopy | None:
    """Return a copy of a loss or norm, or None if it has no value that could be copied."""
    if value is None or value.is_meta:
        return None
    return HostCopy(value.reshape(()))
