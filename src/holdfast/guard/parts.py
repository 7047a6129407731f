"""The objects that a run consists of: models, optimizers, schedulers, averages and other state.

Each object has a name. A single model is named ``"model"`` and a single optimizer ``"optimizer"``.
In a dict, the keys are the names. The names appear as keys of gradient norms, in error messages and
in the files of a checkpoint.

``arguments`` checks the objects passed to `Guard` and names them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.guard.phase import RunState
from holdfast.guard.schedule_length import lengths_of, with_inner
from holdfast.learning.learning_rate import rate_of

_PLAIN_TYPES = (bool, int, float, str, type(None))


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The objects that a guard steps, saves and restores, by name."""

    # The bare modules, without DDP and torch.compile wrappers.
    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    # A scheduler may have the name of the optimizer that it drives, but does not have to.
    schedulers: dict[str, Any]
    # Additional state, including the averages.
    states: dict[str, Stateful]
    # Averages of model weights, by model name.
    averages: Mapping[str, AveragedModel] = field(default_factory=dict)
    # The DistributedDataParallel modules that were passed as models.
    wrappers: Mapping[str, nn.Module] = field(default_factory=dict)
    # Whether a model or a submodule was compiled when the guard was created. Code that is compiled
    # in other ways is detected later.
    compiled: bool = False

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters of all models, each with its name.

        The name begins with that of the model, unless there is only one unnamed model.
        """
        is_single = len(self.models) == 1 and "model" in self.models
        for model_name, model in self.models.items():
            prefix = "" if is_single else f"{model_name}."
            for name, parameter in model.named_parameters():
                yield prefix + name, parameter

    def optimizer_names(self, chosen: str | Sequence[str] | None) -> list[str]:
        """Return the names of the optimizers to step.

        Args:
            chosen: One or several names, as passed to `Guard.step`. None selects all optimizers.

        Raises:
            PolicyError: H104 if there is no optimizer with one of these names.
        """
        all_names = list(self.optimizers)
        if chosen is None:
            return all_names
        names = [chosen] if isinstance(chosen, str) else list(chosen)
        for name in names:
            if name not in all_names:
                raise PolicyError(
                    f"optimizer={name!r}",
                    limit=f"the optimizers of this guard are {', '.join(map(repr, all_names))}",
                    fix=did_you_mean(name, all_names, otherwise="pass one of these."),
                    rule="H104",
                )
        return names

    def devices(self) -> list[torch.device]:
        """Return the accelerators that hold parameters, or an empty list on the CPU."""
        devices = {
            parameter.device for model in self.models.values() for parameter in model.parameters()
        }
        accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
        return sorted(accelerators, key=str)

    def device_type(self) -> str:
        """Return the type of device that the models are on, such as ``"cuda"`` or ``"cpu"``."""
        accelerators = self.devices()
        return accelerators[0].type if accelerators else "cpu"

    # --- settings

    def settings(self) -> dict[str, Any]:
        """Return those settings of optimizers and torch schedulers that have plain values.

        Returns:
            Numbers, strings, None, and lists of numbers, keyed by names such as
            ``"optimizer.0.lr"`` and ``"scheduler decay.gamma"``.
        """
        all_settings = {**self._optimizer_settings(), **self._scheduler_settings()}
        plain_settings = {}
        for name, value in all_settings.items():
            if isinstance(value, tuple):
                value = list(value)
            if isinstance(value, _PLAIN_TYPES) or _is_list_of_numbers(value):
                plain_settings[name] = value
        return plain_settings

    def _optimizer_settings(self) -> dict[str, Any]:
        return {
            f"{name}.{index}.{key}": value
            for name, optimizer in self.optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
        }

    def _scheduler_settings(self) -> dict[str, Any]:
        settings = {}
        for name, scheduler in self.schedulers.items():
            if not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
                continue
            for prefix, inner in with_inner(scheduler):
                for key, value in vars(inner).items():
                    settings[f"scheduler {name}.{prefix}{key}"] = value
            for key, length in lengths_of(scheduler).items():
                settings[f"scheduler {name}.{key}"] = length
        return settings

    def rates(self) -> list[float]:
        """Return the learning rates of all parameter groups."""
        return [
            rate_of(group)
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
        ]

    # --- averages of weights

    def update_averages(self, moved: Sequence[torch.Tensor]) -> None:
        """Update the average of each model whose parameters have changed.

        Args:
            moved: The parameters that were updated by the last step.
        """
        moved_ids = set(map(id, moved))
        for name, average in self.averages.items():
            model = self.models[name]
            if any(id(parameter) in moved_ids for parameter in model.parameters()):
                average.update_parameters(model)

    @contextlib.contextmanager
    def averages_swapped_in(self, state: RunState) -> Iterator[None]:
        """Put averaged parameters and buffers into the models inside the context.

        Args:
            state: The state of the run, which forbids saving inside the context.
        """
        # Leave out averages that have never been updated, since they hold the initial weights.
        names = [name for name, average in self.averages.items() if average.n_averaged > 0]
        in_models = [
            tensor.detach() for name in names for _, tensor in named_tensors(self.models[name])
        ]
        in_averages = [
            tensor.detach()
            for name in names
            for _, tensor in named_tensors(self.averages[name].module)
        ]
        trained = [tensor.clone() for tensor in in_models]
        state.swap_in_averages()
        try:
            _copy_all(in_averages, in_models)
            yield
        finally:
            _copy_all(trained, in_models)
            state.swap_out_averages()


def named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a module's parameters and buffers with their names."""
    return [*module.named_parameters(), *module.named_buffers()]


def _copy_all(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, (int, float)) for item in value)
