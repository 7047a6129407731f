"""`AccumulationCheck`: check that gradients start from zero and reach the optimizer unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from holdfast.learning.eager_hooks import remove_all
from holdfast.learning.measurements import Measurements
from holdfast.learning.measures import dense_gradient, streak
from holdfast.learning.observations import ObservedOptimizer
from holdfast.numerics.eager import is_symbolic

# Number of parameters to watch. `zero_grad` clears the gradients of all parameters, so it is enough
# to watch a few small ones.
WATCHED_PARAMETERS = 3
# Larger parameters are not watched, because the gradients of watched parameters are copied.
MAX_ELEMENTS = 10**6


class AccumulationCheck:
    """Checks that gradients start from zero, and that they reach the optimizer step unchanged.

    On each watched parameter, a tensor hook runs before autograd adds a gradient to ``.grad``, and
    a post-accumulate hook runs afterwards.

    Args:
        parameters: The optimizer's parameters, of which a few small ones are watched.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        learning = [
            parameter
            for parameter in parameters
            if parameter.requires_grad
            and parameter.is_leaf
            and 0 < parameter.numel() <= MAX_ELEMENTS
        ]
        self._watched = sorted(learning, key=lambda parameter: parameter.numel())
        del self._watched[WATCHED_PARAMETERS:]
        # Copies of the gradients after backward, keyed by parameter id.
        self._accumulated: dict[int, Tensor] = {}
        # Whether, since the last step, at least one gradient was added to a ``.grad`` that was
        # None. If so, it is not necessary to know whether another one was zero.
        self._started_without_gradient = False
        # For each gradient since the last step that was added to an existing ``.grad``: whether
        # that one had elements other than 0, bool, shape ``()``.
        self._had_values: list[Tensor] = []
        self._handles: list[RemovableHandle] = []
        for parameter in self._watched:
            before = partial(self._before_accumulation, parameter)
            after = self._after_accumulation
            self._handles += [
                parameter.register_hook(before),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
            ]

    def _before_accumulation(self, parameter: Tensor, _gradient: Tensor) -> None:
        """Measure whether ``.grad`` is None or zero before backward adds to it."""
        if self._started_without_gradient or is_symbolic():
            return
        gradient = dense_gradient(parameter)
        if gradient is None:
            self._started_without_gradient = True
        else:
            self._had_values.append(gradient.any())

    def _after_accumulation(self, parameter: Tensor) -> None:
        """Save a copy of ``.grad`` after backward has added to it."""
        if is_symbolic():
            return
        gradient = dense_gradient(parameter)
        if gradient is not None:
            self._accumulated[id(parameter)] = gradient.clone()

    def measure_step(self, measurements: Measurements, observed: ObservedOptimizer) -> None:
        """Measure leaked, reversed and zeroed gradients, just before an optimizer step.

        Args:
            measurements: The measurements of the step.
            observed: The observations whose counts are updated.
        """
        if self._accumulated:
            note_start = partial(
                _note_start, observed, started_without_gradient=self._started_without_gradient
            )
            measurements.add(note_start, *self._had_values)
            measurements.add(partial(_note_factors, observed), *self._products_since_backward())
        self.forget()

    def forget(self) -> None:
        """Forget the gradients since the last step."""
        self._accumulated.clear()
        self._had_values.clear()
        self._started_without_gradient = False

    def _products_since_backward(self) -> list[Tensor]:
        """Return two numbers for each watched gradient, from which its factor follows.

        They are the dot product of the gradient and its copy from backward, and the squared length
        of the copy, each of shape ``()``.
        """
        products = []
        for parameter in self._watched:
            accumulated = self._accumulated.get(id(parameter))
            current = dense_gradient(parameter)
            if accumulated is None or current is None or accumulated.shape != current.shape:
                continue
            products.append((accumulated * current).sum())
            products.append(accumulated.square().sum())
        return products

    def close(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)


def _note_start(
    observed: ObservedOptimizer, *had_values: Tensor, started_without_gradient: bool
) -> None:
    """Count a step, and whether its gradients were added to those of the step before.

    Args:
        observed: The observations whose counts are updated.
        *had_values: For each gradient that was added to an existing ``.grad``, whether that one had
            elements other than 0.
        started_without_gradient: Whether a gradient was added to a ``.grad`` that was None.
    """
    started_from_zero = started_without_gradient or not all(map(bool, had_values))
    observed.checked += 1
    observed.leaks = streak(observed.leaks, continues=not started_from_zero)


def _note_factors(observed: ObservedOptimizer, *products: Tensor) -> None:
    """Count a step whose watched gradients were reversed or zeroed between backward and the step.

    A gradient's factor is its projection onto its copy from backward: 1 if it was not changed,
    below 0 if it was reversed.

    Args:
        observed: The observations whose counts are updated.
        *products: The numbers that `AccumulationCheck._products_since_backward` has returned.
    """
    numbers = [float(product) for product in products]
    factors = []
    for projection, squared_length in zip(numbers[::2], numbers[1::2], strict=True):
        if math.isfinite(projection) and 0 < squared_length < math.inf:
            factors.append(projection / squared_length)
    if factors and all(factor < 0 for factor in factors):
        observed.reversed += 1
    if factors and all(factor == 0 for factor in factors):
        observed.zeroed += 1
