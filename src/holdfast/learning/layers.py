"""Measure the norms of each parameter's gradient, weight and update.

This module only takes measurements, in sampled steps. The rules interpret them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from holdfast.learning.measures import (
    append_bounded,
    dense_gradient,
    median_or_none,
    norms_of,
    sample_of,
)
from holdfast.learning.observations import ObservedLayer

# Number of elements of a parameter that are compared before and after a step. More would be slow,
# because each element is on a different cache line.
COMPARED_ELEMENTS = 1024
# Number of compared steps that count as the start of training.
FIRST_STEPS = 12
# A parameter's history keeps its first values, which show the start of training, and its newest
# values, up to a maximum length.
FIRST_VALUES = 30
MAX_VALUES = 120
# Maximum number of names to list of parameters whose gradient contains NaN or Inf.
MAX_NAMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Measurements of an optimizer's gradients, just before one of its steps.

    Args:
        tensors: Number of parameters that had a gradient.
        total_norm: Euclidean norm over all gradients.
        nonfinite: Names of the first few parameters whose gradient contained NaN or Inf.
    """

    tensors: int
    total_norm: float
    nonfinite: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingParameter:
    """A parameter that has a gradient, just before an optimizer step."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor


class LayerObserver:
    """Observes the gradient and the update of every parameter in sampled steps.

    Args:
        names: Parameter names, keyed by parameter id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._layers: dict[str, ObservedLayer] = {}
        self._ratios: dict[str, list[float]] = {}
        self._gradient_rms: dict[str, list[float]] = {}
        # The parameters that take part in the current step, keyed by name, each with a sample of
        # its weights before the step.
        self._before: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def before_step(
        self,
        optimizer: str,
        parameters: Iterable[nn.Parameter],
        known_norms: Mapping[int, float] | None = None,
        *,
        weights: bool = True,
    ) -> Gradients:
        """Measure and return the gradients of an optimizer, just before it steps.

        Args:
            optimizer: Name of the optimizer, used to name parameters that are in no model.
            parameters: The optimizer's parameters.
            known_norms: Gradient norms that were already computed, keyed by parameter id.
            weights: Whether to also sample the weights, so that `after_step` can compare them.
        """
        moving = self._find_moving(optimizer, parameters)
        norms = self._norms_of(moving, known_norms or {})
        nonfinite = []
        for moved, norm in zip(moving, norms, strict=True):
            layer = self._layers[moved.name]
            layer.with_gradient += 1
            layer.zero_gradient += norm == 0
            rms = norm / math.sqrt(moved.gradient.numel())
            _append(self._gradient_rms, moved.name, rms)
            # The norm of finite elements can overflow (the square of 1e20 is too large for
            # float32), so check the elements.
            if not math.isfinite(norm) and not bool(moved.gradient.isfinite().all()):
                nonfinite.append(moved.name)
        self._before.clear()
        if weights or nonfinite:
            for moved in moving:
                sample = sample_of(moved.parameter, COMPARED_ELEMENTS).clone()
                self._before[moved.name] = (moved.parameter, sample)
        return Gradients(
            tensors=len(moving),
            total_norm=math.hypot(*norms),
            nonfinite=nonfinite[:MAX_NAMES],
        )

    def _find_moving(
        self, optimizer: str, parameters: Iterable[nn.Parameter]
    ) -> list[MovingParameter]:
        """Count a step for each parameter, and return the parameters with a measurable gradient."""
        moving = []
        for position, parameter in enumerate(parameters):
            name = self._names.get(id(parameter), f"{optimizer}[{position}]")
            layer = self._layers.setdefault(name, ObservedLayer(dims=parameter.dim()))
            layer.steps += 1
            gradient = dense_gradient(parameter)
            if gradient is None or not gradient.numel():
                continue
            if parameter.is_meta or not parameter.is_floating_point():
                continue
            moving.append(MovingParameter(name=name, parameter=parameter, gradient=gradient))
        return moving

    def _norms_of(
        self, moving: list[MovingParameter], known_norms: Mapping[int, float]
    ) -> list[float]:
        """Return the norm of each gradient, from `known_norms` if it contains all of them."""
        ids = [id(moved.parameter) for moved in moving]
        if all(key in known_norms for key in ids):
            return [known_norms[key] for key in ids]
        return norms_of(moved.gradient for moved in moving)

    def after_step(self) -> bool:
        """Compare the weights with their values before the step, and return whether any changed."""
        before = self._before
        self._before = {}
        samples = [sample for _, sample in before.values()]
        steps = [
            sample_of(parameter, COMPARED_ELEMENTS) - sample
            for parameter, sample in before.values()
        ]
        norms = norms_of([*steps, *samples])
        step_norms = norms[: len(steps)]
        weight_norms = norms[len(steps) :]
        for name, sample, step, weight in zip(
            before, samples, step_norms, weight_norms, strict=True
        ):
            layer = self._layers[name]
            layer.last_weight_rms = weight / math.sqrt(sample.numel())
            if layer.first_weight_rms is None:
                layer.first_weight_rms = layer.last_weight_rms
            if not math.isfinite(step):
                layer.nonfinite = True
            elif weight > 0:
                _append(self._ratios, name, step / weight)
        return any(step != 0 for step in step_norms)

    def observations(self) -> dict[str, ObservedLayer]:
        """Return the observations of all parameters, keyed by parameter name."""
        for name, layer in self._layers.items():
            ratios = self._ratios.get(name, [])
            layer.ratio = median_or_none(ratios)
            layer.largest_ratio = max(ratios[:FIRST_STEPS], default=None)
            layer.gradient_rms = median_or_none(self._gradient_rms.get(name, []))
        return dict(self._layers)


def _append(histories: dict[str, list[float]], name: str, value: float) -> None:
    # Append a value to the history of the parameter with this name.
    history = histories.setdefault(name, [])
    append_bounded(history, value, first=FIRST_VALUES, most=MAX_VALUES)
