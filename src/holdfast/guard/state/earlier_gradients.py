"""`EarlierGradients`: in a step over several batches, the gradients of the earlier batches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.guard.state.loss_scale import LossScale


class EarlierGradients:
    """The gradients of a step, summed over all batches before the current one.

    ``accumulation`` stores them here between two batches, and `Attempts` adds them to the gradients
    of every attempt at the current batch. If each step has one batch, there are no such gradients.

    Args:
        loss_scale: The loss scaling for fp16.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale
        # The gradients by parameter, without the loss scale.
        self._gradients: Mapping[torch.Tensor, torch.Tensor] = {}

    def hold(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Store the sums of the gradients over all batches of the step so far, by parameter."""
        self._gradients = gradients

    def discard(self) -> None:
        """Discard all gradients, since the next batch is the first of a step."""
        self._gradients = {}

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the stored gradient of a parameter, or None if there is none."""
        return self._gradients.get(parameter)

    def show(self) -> None:
        """Set the parameters' ``grad`` to these gradients, for scripts that read ``grad``."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient

    def add_to_parameters(self) -> None:
        """Add these gradients to the parameters' ``grad``, after the backward pass of a batch."""
        for parameter, unscaled in self._gradients.items():
            # With fp16, the new gradients are scaled. Otherwise, `scale` returns the tensor itself.
            gradient = self._loss_scale.scale(unscaled)
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            elif parameter.grad.layout != gradient.layout:
                # A dense gradient cannot be added to a sparse one in place.
                parameter.grad = parameter.grad + gradient
            else:
                parameter.grad.add_(gradient)
