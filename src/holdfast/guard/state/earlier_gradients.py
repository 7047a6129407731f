"""`EarlierGradients`: what the earlier batches of a step have contributed to its gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.guard.state.loss_scale import LossScale


class EarlierGradients:
    """The gradients of the batches of a step that came before the current one.

    ``accumulation`` holds them here between two batches, and `Attempts` adds them to the gradients
    of every attempt at the current one. Empty if each batch is a step.

    Args:
        loss_scale: The loss scaling of fp16.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale
        # The gradients, unscaled.
        self._gradients: Mapping[torch.Tensor, torch.Tensor] = {}

    def hold(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Hold the gradients of all batches of the step so far, by parameter."""
        self._gradients = gradients

    def discard(self) -> None:
        """Discard all gradients, so that the next batch is the first of a step."""
        self._gradients = {}

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a parameter, or None if it has received none."""
        return self._gradients.get(parameter)

    def show(self) -> None:
        """Set ``grad`` of the parameters to these gradients, for code that reads it."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient

    def add_to_parameters(self) -> None:
        """Add these gradients to ``grad`` of the parameters, after the backward pass of a batch."""
        for parameter, unscaled in self._gradients.items():
            # In fp16 the new gradients are scaled; otherwise `scale` returns the tensor itself.
            gradient = self._loss_scale.scale(unscaled)
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            elif parameter.grad.layout != gradient.layout:
                # A sparse and a dense gradient cannot be added in place.
                parameter.grad = parameter.grad + gradient
            else:
                parameter.grad.add_(gradient)
