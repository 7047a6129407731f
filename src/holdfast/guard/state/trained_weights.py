"""Whether the weights in the models are those that training has left there.

Many scripts put an average of the weights into the model for an evaluation, and take it out again
afterwards. A checkpoint that is written between the two would hold the average as if it had been
trained.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

# An average that was swapped in differs everywhere, so a few numbers of a few parameters show it.
# They are copied after each step, on the device and without waiting for it.
_PARAMETERS_OF_A_MODEL = 2
_NUMBERS_OF_A_PARAMETER = 16


class TrainedWeights:
    """Remembers a few numbers of the weights of each model as they are after a step.

    Args:
        models: By name.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._parameters = [
            parameter for model in models.values() for parameter in _first_and_last(model)
        ]
        self._numbers: list[torch.Tensor] = []

    def remember(self) -> None:
        """Note the current weights. This takes a few microseconds and does not wait."""
        self._numbers = [_some_numbers(parameter).clone() for parameter in self._parameters]

    def are_in_place(self) -> bool:
        """Return whether the weights are still those that were remembered last.

        This waits for the device once for each of a few parameters. True if nothing was remembered.
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

    Those of float8 and of sharded parameters cannot.
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
