"""Notice when the weights in the models are not the trained ones.

Many scripts put an average of the weights into the model for an evaluation, and restore the trained
weights afterwards. A checkpoint written in between would hold the average in their place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

# An average differs from the trained weights everywhere, so comparing a few numbers of a few
# parameters is enough. They are copied after each step, on the device and without synchronizing.
_PARAMETERS_OF_A_MODEL = 2
_NUMBERS_OF_A_PARAMETER = 16


class TrainedWeights:
    """Remembers a few of the weights of each model after a step.

    Args:
        models: The models by name.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._parameters = [
            parameter for model in models.values() for parameter in _first_and_last(model)
        ]
        self._numbers: list[torch.Tensor] = []

    def remember(self) -> None:
        """Note the current weights. This takes a few microseconds and does not synchronize."""
        self._numbers = [_some_numbers(parameter).clone() for parameter in self._parameters]

    def are_in_place(self) -> bool:
        """Return whether the weights are still those of the last `remember`.

        True if there was none. This synchronizes with the device once per compared parameter.
        """
        try:
            return all(
                torch.equal(_some_numbers(parameter), numbers)
                for parameter, numbers in zip(self._parameters, self._numbers, strict=False)
            )
        except RuntimeError:
            # The weights have been moved to another device.
            return False


def _first_and_last(model: nn.Module) -> list[nn.Parameter]:
    trained = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and _is_readable(parameter)
    ]
    if len(trained) <= _PARAMETERS_OF_A_MODEL:
        return trained
    return [trained[0], trained[-1]]


def _is_readable(parameter: nn.Parameter) -> bool:
    """Return whether the values of a parameter can be copied and compared.

    Those of float8 parameters and of sharded parameters cannot.
    """
    return (
        type(parameter.data) is torch.Tensor
        and parameter.layout is torch.strided
        and parameter.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        and parameter.device.type != "meta"
        and parameter.numel() > 0
    )


def _some_numbers(parameter: nn.Parameter) -> torch.Tensor:
    """Return a view of the first numbers of a parameter along its first dimension."""
    values = parameter.detach()
    while values.dim() > 1:
        values = values[0]
    return values[:_NUMBERS_OF_A_PARAMETER] if values.dim() else values
