"""`LossScale`: loss scaling for fp16, in steps that can be rolled back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class LossScale:
    """torch's gradient scaler, with a method to undo a step."""

    def __init__(self, device_type: str, *, enabled: bool) -> None:
        self._device_type = device_type
        self.enabled = enabled
        self._scaler = self._new()
        self._unscaled = False

    def _new(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device_type, enabled=self.enabled)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss multiplied by the scale, or the loss itself without loss scaling."""
        return self._scaler.scale(loss)

    def unscale(self, optimizers: Mapping[str, Optimizer], names: Sequence[str]) -> None:
        """Divide the gradients of these optimizers by the scale. Call this once per step."""
        self._unscaled = True
        for name in names:
            self._scaler.unscale_(optimizers[name])

    def note_nonfinite(self) -> None:
        """Make the next `update` lower the scale, although the unscaled gradients are finite.

        A late step may have been refused because of gradients that its repetition does not have.
        """
        if not self.enabled:
            return
        # torch's scaler has no method for that.
        for state in self._scaler._per_optimizer_states.values():
            for found_inf in state["found_inf_per_device"].values():
                found_inf.fill_(1.0)

    def update(self) -> None:
        """Adjust the scale after a step.

        The scale is lowered if a gradient was not finite, and raised after many finite steps.
        """
        if self.enabled:
            self._scaler.update()
            self._unscaled = False

    def capture(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return copies of the scale and of the growth tracker, without synchronizing.

        The scaler's ``state_dict`` would read both. Call this after `scale`, which creates them.

        Returns:
            Two tensors of shape ``(1,)``, or None without loss scaling.
        """
        if not self.enabled:
            return None
        scale = self._scaler._scale
        growth_tracker = self._scaler._growth_tracker
        assert scale is not None
        assert growth_tracker is not None
        return scale.clone(), growth_tracker.clone()

    def restore(self, copies: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Restore the scale and the growth tracker. This synchronizes with the device.

        Args:
            copies: The value that `capture` returned.
        """
        if copies is None:
            return
        scale, growth_tracker = copies
        state = self._scaler.state_dict()
        state["scale"] = scale.item()
        state["_growth_tracker"] = int(growth_tracker.item())
        self._scaler.load_state_dict(state)

    def forget(self) -> None:
        """Undo `unscale`. torch's scaler has no method for that, so a new one is created."""
        if self._unscaled:
            state = self._scaler.state_dict()
            self._scaler = self._new()
            self._scaler.load_state_dict(state)
            self._unscaled = False

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Return a context for a further pass of a step whose gradients were already unscaled.

        The pass uses the same scale. What it finds out about its gradients is discarded.
        """
        scaler = self._scaler
        unscaled = self._unscaled
        state = scaler.state_dict()
        self._scaler = self._new()
        self._scaler.load_state_dict(state)
        self._unscaled = False
        try:
            yield
        finally:
            self._scaler = scaler
            self._unscaled = unscaled

    def value(self) -> float | None:
        """Return the scale, or None without loss scaling. This synchronizes with the device."""
        return self._scaler.get_scale() if self.enabled else None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of torch's gradient scaler, or None without loss scaling."""
        return self._scaler.state_dict() if self.enabled else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a state. This does nothing if the state is None or there is no loss scaling."""
        if self.enabled and state is not None:
            self._scaler.load_state_dict(state)
