"""Measure the norms of each parameter's gradient, weight and update.

This module only takes measurements, in sampled steps. The rules interpret them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from holdfast.learning.measurements import Measurements
from holdfast.learning.measures import (
    append_bounded,
    dense_gradient,
    median_or_none,
    norms_of,
    sample_of,
)
from holdfast.learning.observations import ObservedLayer
from holdfast.memory.host_copy import HostCopies

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
class KnownNorms:
    """Norms of finite gradients that the caller has computed.

    Args:
        ids: The id of each parameter.
        norms: The norm of each parameter's gradient, shape ``(len(ids),)``.
    """

    ids: Sequence[int]
    norms: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingParameter:
    """A parameter that has a gradient, just before an optimizer step."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """Facts about the parameters of an optimizer that are known without reading the device.

    Args:
        dims: Number of dimensions of each parameter, keyed by name.
        moving: Names of the parameters that have a gradient.
        sizes: Number of elements of each of their gradients.
    """

    dims: Mapping[str, int]
    moving: Sequence[str]
    sizes: Sequence[int]


class LayerObserver:
    """Observes the gradient and the update of every parameter in sampled steps.

    Args:
        names: Parameter names, keyed by parameter id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        # The observations of each parameter, keyed by name. Their medians are not up to date.
        self.layers: dict[str, ObservedLayer] = {}
        self._ratios: dict[str, list[float]] = {}
        self._gradient_rms: dict[str, list[float]] = {}
        # The parameters that take part in the current step, keyed by name, each with a sample of
        # its weights before the step.
        self._before: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def measure_gradients(
        self,
        measurements: Measurements,
        optimizer: str,
        parameters: Iterable[nn.Parameter],
        note: Callable[[Gradients], None],
        known_norms: KnownNorms | None = None,
        *,
        weights: bool = True,
    ) -> None:
        """Measure the gradients of an optimizer, just before it steps.

        Without `known_norms`, this waits for the device: a gradient may be NaN or Inf, and then its
        parameter must be sampled before the step changes it.

        Args:
            measurements: The measurements of the step.
            optimizer: Name of the optimizer, used to name parameters that are in no model.
            parameters: The optimizer's parameters.
            note: Function that is called with the gradients once they have been read.
            known_norms: The gradient norms, if they have already been computed.
            weights: Whether to also sample the weights, so that `measure_update` can compare them.
        """
        named_parameters = {
            self._names.get(id(parameter), f"{optimizer}[{position}]"): parameter
            for position, parameter in enumerate(parameters)
        }
        moving = _find_moving(named_parameters)
        layers = _Layers(
            dims={name: parameter.dim() for name, parameter in named_parameters.items()},
            moving=[moved.name for moved in moving],
            sizes=[moved.gradient.numel() for moved in moving],
        )
        nonfinite: list[str] = []
        positions = _positions_in(known_norms, moving)
        if known_norms is not None and positions is not None:
            note_norms = partial(self._note_known_norms, layers, note, positions)
            measurements.add(note_norms, known_norms.norms)
        else:
            norms = _read(norms_of([moved.gradient for moved in moving]))
            nonfinite = _names_of_nonfinite(moving, norms)
            measurements.add(partial(self._note_gradients, layers, note, norms, nonfinite))
        self._before.clear()
        if weights or nonfinite:
            for moved in moving:
                sample = sample_of(moved.parameter, COMPARED_ELEMENTS).clone()
                self._before[moved.name] = (moved.parameter, sample)

    def _note_known_norms(
        self,
        layers: _Layers,
        note: Callable[[Gradients], None],
        positions: Sequence[int],
        norms: Tensor,
    ) -> None:
        values = norms.tolist()
        self._note_gradients(layers, note, [values[position] for position in positions], [])

    def _note_gradients(
        self,
        layers: _Layers,
        note: Callable[[Gradients], None],
        norms: Sequence[float],
        nonfinite: Sequence[str],
    ) -> None:
        for name, dims in layers.dims.items():
            layer = self.layers.setdefault(name, ObservedLayer(dims=dims))
            layer.steps += 1
        for name, size, norm in zip(layers.moving, layers.sizes, norms, strict=True):
            layer = self.layers[name]
            layer.with_gradient += 1
            layer.zero_gradient += norm == 0
            _append(self._gradient_rms, name, norm / math.sqrt(size))
        gradients = Gradients(
            tensors=len(norms),
            total_norm=math.hypot(*norms),
            nonfinite=list(nonfinite[:MAX_NAMES]),
        )
        note(gradients)

    def measure_update(self, measurements: Measurements, note: Callable[[int], None]) -> None:
        """Compare the weights with their values before the step.

        Args:
            measurements: The measurements of the step.
            note: Function that is called with the number of parameters that have changed.
        """
        before = self._before
        self._before = {}
        samples = [sample for _, sample in before.values()]
        updates = [
            sample_of(parameter, COMPARED_ELEMENTS) - sample
            for parameter, sample in before.values()
        ]
        sizes = {name: sample.numel() for name, (_, sample) in before.items()}
        measurements.add(partial(self._note_update, sizes, note), *norms_of([*updates, *samples]))

    def _note_update(
        self, sizes: Mapping[str, int], note: Callable[[int], None], *norms: Tensor
    ) -> None:
        values = [float(norm) for norm in norms]
        update_norms = values[: len(sizes)]
        weight_norms = values[len(sizes) :]
        for (name, size), update, weight in zip(
            sizes.items(), update_norms, weight_norms, strict=True
        ):
            layer = self.layers[name]
            layer.last_weight_rms = weight / math.sqrt(size)
            if layer.first_weight_rms is None:
                layer.first_weight_rms = layer.last_weight_rms
            if not math.isfinite(update):
                layer.nonfinite = True
            elif weight > 0:
                _append(self._ratios, name, update / weight)
        note(sum(update != 0 for update in update_norms))

    def observations(self) -> dict[str, ObservedLayer]:
        """Return the observations of all parameters, keyed by parameter name."""
        for name, layer in self.layers.items():
            ratios = self._ratios.get(name, [])
            layer.ratio = median_or_none(ratios)
            layer.largest_ratio = max(ratios[:FIRST_STEPS], default=None)
            layer.gradient_rms = median_or_none(self._gradient_rms.get(name, []))
        return dict(self.layers)


def _find_moving(named_parameters: Mapping[str, nn.Parameter]) -> list[MovingParameter]:
    """Return the parameters with a gradient that can be measured."""
    moving = []
    for name, parameter in named_parameters.items():
        gradient = dense_gradient(parameter)
        if gradient is None or not gradient.numel():
            continue
        if parameter.is_meta or not parameter.is_floating_point():
            continue
        moving.append(MovingParameter(name=name, parameter=parameter, gradient=gradient))
    return moving


def _positions_in(
    known_norms: KnownNorms | None, moving: Sequence[MovingParameter]
) -> list[int] | None:
    """Return the position of each parameter's norm, or None if not all of them are known."""
    if known_norms is None:
        return None
    positions = {parameter: position for position, parameter in enumerate(known_norms.ids)}
    ids = [id(moved.parameter) for moved in moving]
    if not all(parameter in positions for parameter in ids):
        return None
    return [positions[parameter] for parameter in ids]


def _read(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of tensors of shape ``()``. This waits for the device once."""
    return [float(scalar) for scalar in HostCopies(scalars, blocking=True).read()]


def _names_of_nonfinite(moving: Sequence[MovingParameter], norms: Sequence[float]) -> list[str]:
    """Return the names of the parameters whose gradient contains NaN or Inf.

    The norm of finite elements can overflow (the square of 1e20 is too large for fp32), so the
    elements are checked.
    """
    return [
        moved.name
        for moved, norm in zip(moving, norms, strict=True)
        if not math.isfinite(norm) and not bool(moved.gradient.isfinite().all())
    ]


def _append(histories: dict[str, list[float]], name: str, value: float) -> None:
    # Append a value to the history of the parameter with this name.
    history = histories.setdefault(name, [])
    append_bounded(history, value, first=FIRST_VALUES, most=MAX_VALUES)
