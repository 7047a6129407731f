"""Observe a model: which of its weights learn, and whether it runs in training mode."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from holdfast.learning.measures import can_be_measured, sample_of
from holdfast.learning.observations import ObservedLayer, ObservedModel

# Maximum number of names listed in a finding.
MAX_NAMES = 5
# Number of sampled steps without a gradient after which a parameter counts as never getting one.
ENOUGH_STEPS_WITHOUT_GRADIENT = 10

NamedParameters = Mapping[str, nn.Parameter]


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a parameter.

    Args:
        name: Full name of the parameter.
        pattern: A shell pattern that is matched against the full name, or the name of a module that
            contains the parameter.
    """
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


class ModelObserver:
    """Observes one model.

    Args:
        module: The model.
        prefix: Prefix for the names of its parameters, if several models are observed.
        frozen: Patterns of parameters that are frozen on purpose (see `matches`).
    """

    def __init__(self, module: nn.Module, prefix: str, frozen: Sequence[str]) -> None:
        self.module = module
        self._prefix = prefix
        self._frozen = frozen
        self._at_start = {
            name: sample_of(parameter).clone()
            for name, parameter in self.named_parameters().items()
            if can_be_measured(parameter)
        }
        self._observed = ObservedModel()
        # Ids of the parameters that had a gradient just before a step. They cannot be determined
        # later, because a guard drops the gradients of parameters that are not in an optimizer.
        self._had_gradient: set[int] = set()
        # Number of forward passes without an autograd graph since the last step, keyed by
        # `module.training`.
        self._passes_without_graph = {True: 0, False: 0}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return all initialized parameters, keyed by full name."""
        return {
            self._prefix + name: parameter
            for name, parameter in self.module.named_parameters()
            if not isinstance(parameter, nn.parameter.UninitializedParameter)
        }

    def note_pass_without_graph(self) -> None:
        """Count a forward pass without an autograd graph, as in an evaluation."""
        self._passes_without_graph[self.module.training] += 1

    def note_step(self) -> None:
        """Record the model's gradients and mode in a sampled step, before the optimizer steps."""
        self._observed.observed += 1
        self._passes_without_graph = {True: 0, False: 0}
        self._had_gradient.update(
            id(parameter) for parameter in self.module.parameters() if parameter.grad is not None
        )
        is_in_eval_mode = not self.module.training and any(
            not module.training for module in self._mode_dependent().values()
        )
        if is_in_eval_mode:
            self._observed.eval_steps += 1

    def note_validation(self) -> None:
        """Count a validation, and whether it ran entirely in training mode."""
        passes = self._passes_without_graph
        ran_in_training_mode = passes[True] > 0 and passes[False] == 0
        self._observed.validations += 1
        if ran_in_training_mode and self._mode_dependent():
            self._observed.train_mode_validations += 1
        self._passes_without_graph = {True: 0, False: 0}

    def observations(
        self, in_optimizers: Collection[int], layers: Mapping[str, ObservedLayer]
    ) -> ObservedModel:
        """Return all observations of the model.

        Args:
            in_optimizers: Ids of all parameters that are in an optimizer.
            layers: The observations of each parameter, keyed by parameter name.
        """
        learning = self._parameters_meant_to_learn()
        self._observed.weights = _elements(learning)
        self._note_outside(parameters_missing_from(in_optimizers, learning))
        self._note_without_gradient(
            parameters_without_gradient(in_optimizers, learning, layers),
            first=next(iter(learning), ""),
        )
        self._observed.symmetric = self._symmetric(learning)[:MAX_NAMES]
        self._observed.changed = self._any_changed(self._at_start)
        self._observed.nonfinite_buffers = self._nonfinite_running_statistics()[:MAX_NAMES]
        self._observed.mode_dependent = list(self._mode_dependent())[:MAX_NAMES]
        self._observed.normalizes_input = normalizes_input(self.module)
        return self._observed

    def _parameters_meant_to_learn(self) -> NamedParameters:
        """Return the parameters that require a gradient and match no `frozen` pattern."""
        return {
            name: parameter
            for name, parameter in self.named_parameters().items()
            if parameter.requires_grad
            and not any(matches(name, pattern) for pattern in self._frozen)
        }

    def _note_outside(self, outside: NamedParameters) -> None:
        # `outside` contains the parameters that should learn but are not in any optimizer.
        self._observed.outside = list(outside)[:MAX_NAMES]
        self._observed.outside_count = len(outside)
        self._observed.outside_weights = _elements(outside)
        self._observed.outside_with_gradient = sum(
            id(parameter) in self._had_gradient for parameter in outside.values()
        )
        self._observed.outside_changed = self._any_changed(outside)

    def _note_without_gradient(self, never: NamedParameters, *, first: str) -> None:
        # `first` is the name of the model's first trainable parameter.
        self._observed.never_gradient = list(never)[:MAX_NAMES]
        self._observed.never_gradient_count = len(never)
        self._observed.never_gradient_weights = _elements(never)
        self._observed.never_gradient_first = first in never

    def _symmetric(self, learning: NamedParameters) -> list[str]:
        """Return the names of all matrices with equal rows, other than embeddings."""
        tables = {
            f"{self._prefix}{name}.weight"
            for name, module in self.module.named_modules()
            if isinstance(module, nn.Embedding)
        }
        return [
            name
            for name, parameter in learning.items()
            if name not in tables and parameter.grad is not None and has_equal_rows(parameter)
        ]

    def _nonfinite_running_statistics(self) -> list[str]:
        return [
            self._prefix + name
            for name, buffer in self.module.named_buffers()
            if "running" in name and _is_dense_number(buffer) and not bool(buffer.isfinite().all())
        ]

    def _mode_dependent(self) -> dict[str, nn.Module]:
        """Return the modules that behave differently in training mode, keyed by name."""
        return {
            name: module
            for name, module in self.module.named_modules()
            if isinstance(module, (_DropoutNd, _BatchNorm))
        }

    def _any_changed(self, names: Iterable[str]) -> bool:
        """Return whether any of these parameters was removed or differs from its first sample."""
        now = self.named_parameters()
        for name in names:
            if name not in self._at_start:
                continue
            if name not in now:
                return True
            sample = torch.nan_to_num(sample_of(now[name]))
            if not torch.equal(sample, torch.nan_to_num(self._at_start[name])):
                return True
        return False


def parameters_missing_from(
    in_optimizers: Collection[int], learning: NamedParameters
) -> NamedParameters:
    """Return the parameters that are not in any optimizer."""
    return {
        name: parameter
        for name, parameter in learning.items()
        if id(parameter) not in in_optimizers
    }


def parameters_without_gradient(
    in_optimizers: Collection[int], learning: NamedParameters, layers: Mapping[str, ObservedLayer]
) -> NamedParameters:
    """Return the parameters that are in an optimizer but had no gradient in any sampled step."""
    without = {}
    for name, parameter in learning.items():
        layer = layers.get(name)
        if layer is None or id(parameter) not in in_optimizers:
            continue
        if layer.steps >= ENOUGH_STEPS_WITHOUT_GRADIENT and layer.with_gradient == 0:
            without[name] = parameter
    return without


def has_equal_rows(weight: nn.Parameter) -> bool:
    """Return whether all rows of a matrix are equal.

    Returns False for a matrix with a single row or column.
    """
    if weight.dim() < 2 or weight.shape[0] < 2 or weight.numel() == weight.shape[0]:
        return False
    # Compare the first row with the last one before comparing all rows. They almost always differ,
    # so this is faster.
    if not torch.equal(weight[0], weight[-1]):
        return False
    return bool((weight.detach() == weight.detach()[:1]).all())


def normalizes_input(module: nn.Module) -> bool:
    """Return whether the first layer of a model is a normalization layer."""
    layers = [
        layer
        for layer in module.modules()
        if not list(layer.children()) and not isinstance(layer, nn.Flatten)
    ]
    return bool(layers) and "Norm" in type(layers[0]).__name__


def _is_dense_number(tensor: torch.Tensor) -> bool:
    """Return whether `torch.isfinite` supports a tensor. Float8 and sparse tensors are excluded."""
    return can_be_measured(tensor) and tensor.layout is torch.strided and tensor.element_size() > 1


def _elements(parameters: NamedParameters) -> int:
    return sum(parameter.numel() for parameter in parameters.values())
