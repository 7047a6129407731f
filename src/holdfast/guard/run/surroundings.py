"""Restore what a step depends on, besides its batch, when it is repeated later.

A step that is decided late may be repeated in the middle of the script's next lines: inside
``torch.no_grad()``, while the model is in evaluation mode, or after the script has changed the
learning rate for the next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Hyperparameters:
    """The hyperparameters of optimizers at one moment, such as their learning rates.

    A learning rate that is a tensor and is changed in place is not restored.

    Args:
        optimizers: The optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._values = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the hyperparameters inside the context.

        On exit, those that the script has assigned since then are assigned again. All others keep
        the values that they have at that time, for example from a scheduler inside the context.
        """
        assigned: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for group, values in self._values:
            changed = {name: group[name] for name in values if group[name] is not values[name]}
            if changed:
                assigned.append((group, changed))
                group.update({name: values[name] for name in changed})
        try:
            yield
        finally:
            for group, changed in assigned:
                group.update(changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Autocast:
    """Whether and how autocast is enabled for a type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, device_type: str) -> _Autocast:
        return cls(
            device_type=device_type,
            enabled=torch.is_autocast_enabled(device_type),
            dtype=torch.get_autocast_dtype(device_type),
        )


class Surroundings:
    """What a step depends on when it is called, besides its batch and the state of training.

    Args:
        modules: The modules whose training mode to remember.
        optimizers: The optimizers of the step.
        device_type: The type of device of the models, such as ``"cuda"``.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], device_type: str
    ) -> None:
        self.hyperparameters = Hyperparameters(optimizers)
        self._modules = modules
        self._training_modes = [module.training for module in modules]
        self._is_inference = torch.is_inference_mode_enabled()
        self._needs_gradients = torch.is_grad_enabled()
        self._autocasts = [_Autocast.of(kind) for kind in {"cpu", device_type}]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore everything inside the context, and the current state on exit."""
        training_modes = [module.training for module in self._modules]
        self._set_training_modes(self._training_modes)
        try:
            with contextlib.ExitStack() as contexts:
                contexts.enter_context(self.hyperparameters.restored())
                contexts.enter_context(torch.inference_mode(self._is_inference))
                contexts.enter_context(torch.set_grad_enabled(self._needs_gradients))
                for autocast in self._autocasts:
                    if autocast != _Autocast.of(autocast.device_type):
                        contexts.enter_context(
                            torch.autocast(
                                autocast.device_type, autocast.dtype, enabled=autocast.enabled
                            )
                        )
                yield
        finally:
            self._set_training_modes(training_modes)

    def _set_training_modes(self, modes: Sequence[bool]) -> None:
        for module, mode in zip(self._modules, modes, strict=True):
            module.training = mode
