"""The loss scale of fp16, with one owner, so that it is unscaled and updated once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class LossScale:
    """A gradient scaler that can forget a step that is taken back."""

    def __init__(self, device_type: str, *, enabled: bool) -> None:
        self._device_type = device_type
        self._enabled = enabled
        self._scaler = self._new()
        self._unscaled = False

    def _new(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device_type, enabled=self._enabled)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale."""
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of these optimizers by the scale, once in a step."""
        if self._enabled:
            self._unscaled = True
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)

    def update(self) -> None:
        """Move the scale after a step: down if a gradient was not finite, up after many that were."""
        if self._enabled:
            self._scaler.update()
            self._unscaled = False

    def forget(self) -> None:
        """Take back `unscale`. torch's scaler knows no way but to be made anew."""
        if self._unscaled:
            state = self._scaler.state_dict()
            self._scaler = self._new()
            self._scaler.load_state_dict(state)
            self._unscaled = False

    def value(self) -> float | None:
        """Return the scale, or None if there is none. Cost: one host sync."""
        return self._scaler.get_scale() if self._enabled else None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state, or None if there is no scale."""
        return self._scaler.state_dict() if self._enabled else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Put the state back; without one, or without a scale, nothing changes."""
        if self._enabled and state is not None:
            self._scaler.load_state_dict(state)
