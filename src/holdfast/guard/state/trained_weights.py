"""Detect that a script has replaced the trained weights in the models.

Many scripts put averaged weights into the model for an evaluation, and restore the trained weights
afterwards. A checkpoint saved in between would contain averaged instead of trained weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# Averaged weights differ from the trained ones in all elements, so it is enough to compare a few
# elements of a few parameters. These are copied after each step, on the device and without
# synchronizing with it.
_PARAMETERS_OF_A_MODEL = 2
_NUMBERS_OF_A_PARAMETER = 16


class TrainedWeights:
    """Stores a few weights of each model after every step, to detect when they are replaced.

    Args:
        models: The models by name.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._parameters = [
            parameter for model in models.values() for parameter in _first_and_last(model)
        ]
        # Views of a few numbers of each parameter, and the places of the parameters' values in
        # memory when the views were made.
        self._views: list[torch.Tensor] = []
        self._places: list[tuple[Any, Any]] = []
        # Copies of these numbers.
        self._numbers: list[torch.Tensor] = []

    def remember(self) -> None:
        """Store a few of the weights. This takes microseconds, without synchronization."""
        places = [
            (parameter.untyped_storage()._cdata, parameter.storage_offset())
            for parameter in self._parameters
        ]
        if places != self._places:
            # A parameter has new values, for example because it was moved to another device.
            self._views = [_some_numbers(parameter) for parameter in self._parameters]
            self._places = places
        self._numbers = [view.clone() for view in self._views]

    def are_in_place(self) -> bool:
        """Return whether the stored weights still have the same values as at the last `remember`.

        The result is True if `remember` was never called. This synchronizes with the device once
        for each compared parameter.
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
    # The parameters of a model to compare: the first and the last trained one.
    trained = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and _is_readable(parameter)
    ]
    if len(trained) <= _PARAMETERS_OF_A_MODEL:
        return trained
    return [trained[0], trained[-1]]


def _is_readable(parameter: nn.Parameter) -> bool:
    """Return whether a parameter's values can be copied and compared.

    This is not possible for float8 and sharded parameters.
    """
    return (
        type(parameter.data) is torch.Tensor
        and parameter.layout is torch.strided
        and parameter.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        and parameter.device.type != "meta"
        and parameter.numel() > 0
    )


def _some_numbers(parameter: nn.Parameter) -> torch.Tensor:
    """Return a one-dimensional view of a parameter's first elements, or a view of a scalar."""
    values = parameter.detach()
    while values.dim() > 1:
        values = values[0]
    return values[:_NUMBERS_OF_A_PARAMETER] if values.dim() else values
