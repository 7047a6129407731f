"""Observe a model: which of its weights learn, and whether it runs in training mode."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from holdfast.learning.measurements import Measurements
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
        # All observations that have been noted.
        self.observed = ObservedModel()
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

    def measure_pass_without_graph(self, measurements: Measurements) -> None:
        """Count a forward pass without an autograd graph, as in an evaluation."""
        note = partial(self._note_pass_without_graph, is_training=self.module.training)
        measurements.add(note)

    def _note_pass_without_graph(self, *, is_training: bool) -> None:
        self._passes_without_graph[is_training] += 1

    def measure_step(self, measurements: Measurements) -> None:
        """Look at the model's gradients and mode in a sampled step, before the optimizer steps."""
        with_gradient = [
            id(parameter) for parameter in self.module.parameters() if parameter.grad is not None
        ]
        is_in_eval_mode = not self.module.training and any(
            not module.training for module in self._mode_dependent().values()
        )
        measurements.add(partial(self._note_step, with_gradient, is_in_eval_mode=is_in_eval_mode))

    def _note_step(self, with_gradient: Iterable[int], *, is_in_eval_mode: bool) -> None:
        self.observed.observed += 1
        self._passes_without_graph = {True: 0, False: 0}
        self._had_gradient.update(with_gradient)
        self.observed.eval_steps += is_in_eval_mode

    def note_validation(self) -> None:
        """Count a validation, and whether it ran entirely in training mode."""
        passes = self._passes_without_graph
        ran_in_training_mode = passes[True] > 0 and passes[False] == 0
        self.observed.validations += 1
        if ran_in_training_mode and self._mode_dependent():
            self.observed.train_mode_validations += 1
        self._passes_without_graph = {True: 0, False: 0}

    def measure(
        self,
        measurements: Measurements,
        in_optimizers: Collection[int],
        layers: Mapping[str, ObservedLayer],
    ) -> None:
        """Examine the model as it is now. `observed` holds the result once it has been noted.

        Args:
            measurements: The measurements to add to.
            in_optimizers: Ids of all parameters that are in an optimizer.
            layers: The observations of each parameter, keyed by parameter name. They are looked at
                once the measurements that were added before have been noted.
        """
        learning = self._parameters_meant_to_learn()
        outside = parameters_missing_from(in_optimizers, learning)
        measurements.add(partial(self._note_learning, learning, in_optimizers, layers))
        measurements.add(partial(self._note_outside, outside))
        measurements.add(self._note_outside_changed, *self._changes_of(outside))
        if not self.observed.changed:
            measurements.add(self._note_changed, *self._changes_of(self._at_start))
        matrices = self._matrices_with_gradient(learning)
        measurements.add(
            partial(self._note_symmetric, list(matrices)),
            *[are_rows_equal(matrix) for matrix in matrices.values()],
        )
        statistics = self._running_statistics()
        measurements.add(
            partial(self._note_running_statistics, list(statistics)),
            *[buffer.isfinite().all() for buffer in statistics.values()],
        )
        measurements.add(
            partial(
                self._note_modules,
                mode_dependent=list(self._mode_dependent())[:MAX_NAMES],
                normalizes_input=normalizes_input(self.module),
            )
        )

    def _parameters_meant_to_learn(self) -> NamedParameters:
        """Return the parameters that require a gradient and match no `frozen` pattern."""
        return {
            name: parameter
            for name, parameter in self.named_parameters().items()
            if parameter.requires_grad
            and not any(matches(name, pattern) for pattern in self._frozen)
        }

    def _note_learning(
        self,
        learning: NamedParameters,
        in_optimizers: Collection[int],
        layers: Mapping[str, ObservedLayer],
    ) -> None:
        never = parameters_without_gradient(in_optimizers, learning, layers)
        self.observed.weights = _elements(learning)
        self.observed.never_gradient = list(never)[:MAX_NAMES]
        self.observed.never_gradient_count = len(never)
        self.observed.never_gradient_weights = _elements(never)
        self.observed.never_gradient_first = next(iter(learning), "") in never

    def _note_outside(self, outside: NamedParameters) -> None:
        # `outside` contains the parameters that should learn but are not in any optimizer.
        self.observed.outside = list(outside)[:MAX_NAMES]
        self.observed.outside_count = len(outside)
        self.observed.outside_weights = _elements(outside)
        self.observed.outside_with_gradient = sum(
            id(parameter) in self._had_gradient for parameter in outside.values()
        )

    def _note_outside_changed(self, *changes: Tensor) -> None:
        self.observed.outside_changed = any(map(bool, changes))

    def _note_changed(self, *changes: Tensor) -> None:
        self.observed.changed = any(map(bool, changes))

    def _note_symmetric(self, names: Sequence[str], *are_equal: Tensor) -> None:
        symmetric = [name for name, equal in zip(names, are_equal, strict=True) if bool(equal)]
        self.observed.symmetric = symmetric[:MAX_NAMES]

    def _note_running_statistics(self, names: Sequence[str], *are_finite: Tensor) -> None:
        nonfinite = [
            name for name, finite in zip(names, are_finite, strict=True) if not bool(finite)
        ]
        self.observed.nonfinite_buffers = nonfinite[:MAX_NAMES]

    def _note_modules(self, *, mode_dependent: list[str], normalizes_input: bool) -> None:
        self.observed.mode_dependent = mode_dependent
        self.observed.normalizes_input = normalizes_input

    def _matrices_with_gradient(self, learning: NamedParameters) -> NamedParameters:
        """Return all matrices with several rows and columns, other than embeddings."""
        tables = {
            f"{self._prefix}{name}.weight"
            for name, module in self.module.named_modules()
            if isinstance(module, nn.Embedding)
        }
        return {
            name: parameter
            for name, parameter in learning.items()
            if name not in tables
            and parameter.grad is not None
            and parameter.dim() >= 2
            and parameter.shape[0] >= 2
            and parameter.numel() > parameter.shape[0]
        }

    def _running_statistics(self) -> dict[str, Tensor]:
        return {
            self._prefix + name: buffer
            for name, buffer in self.module.named_buffers()
            if "running" in name and _is_dense_number(buffer)
        }

    def _mode_dependent(self) -> dict[str, nn.Module]:
        """Return the modules that behave differently in training mode, keyed by name.

        Modules in a frozen part of the model are left out, because that part is often kept in
        evaluation mode on purpose.
        """
        return {
            name: module
            for name, module in self.module.named_modules()
            if isinstance(module, (_DropoutNd, _BatchNorm)) and not self._is_frozen(name)
        }

    def _is_frozen(self, name: str) -> bool:
        """Return whether no parameter of a module learns, or of its parent if it has none."""
        parameters = list(self.module.get_submodule(name).parameters())
        if not parameters:
            parent, _, _ = name.rpartition(".")
            parameters = list(self.module.get_submodule(parent).parameters())
        return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)

    def _changes_of(self, names: Iterable[str]) -> list[Tensor]:
        """Return flags, one of which is True if any of these parameters has changed.

        A parameter has changed if it was removed, or if it differs from its first sample. Each flag
        is a bool tensor of shape ``()``.
        """
        now = self.named_parameters()
        changes = []
        for name in names:
            if name not in self._at_start:
                continue
            first = self._at_start[name]
            sample = sample_of(now[name]) if name in now else None
            if sample is None or sample.shape != first.shape:
                return [torch.ones((), dtype=torch.bool, device="cpu")]
            # The model may have been moved to another device or dtype since then.
            first = first.to(sample)
            changes.append((torch.nan_to_num(sample) != torch.nan_to_num(first)).any())
        return changes


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


def are_rows_equal(matrix: Tensor) -> Tensor:
    """Return whether all rows of a matrix are equal, as a bool tensor of shape ``()``."""
    matrix = matrix.detach()
    if matrix.is_cpu and not torch.equal(matrix[0], matrix[-1]):
        # They almost always differ, so this saves time. On another device, the host would wait.
        return torch.zeros((), dtype=torch.bool, device="cpu")
    return (matrix == matrix[:1]).all()


def normalizes_input(module: nn.Module) -> bool:
    """Return whether the first layer of a model is a normalization layer."""
    layers = [
        layer
        for layer in module.modules()
        if not list(layer.children()) and not isinstance(layer, nn.Flatten)
    ]
    return bool(layers) and "Norm" in type(layers[0]).__name__


def _is_dense_number(tensor: Tensor) -> bool:
    """Return whether `torch.isfinite` supports a tensor. Float8 and sparse tensors are excluded."""
    return can_be_measured(tensor) and tensor.layout is torch.strided and tensor.element_size() > 1


def _elements(parameters: NamedParameters) -> int:
    return sum(parameter.numel() for parameter in parameters.values())
