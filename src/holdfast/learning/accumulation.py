"""`AccumulationCheck`: check that gradients start from zero and reach the optimizer unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from holdfast.learning.eager_hooks import remove_all
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
        # Whether, since the last step, at least one gradient was added to a ``.grad`` that was None
        # or zero.
        self._started_from_zero = False
        self._handles: list[RemovableHandle] = []
        for parameter in self._watched:
            before = partial(self._before_accumulation, parameter)
            after = self._after_accumulation
            self._handles += [
                parameter.register_hook(before),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
            ]

    def _before_accumulation(self, parameter: Tensor, _gradient: Tensor) -> None:
        """Record whether ``.grad`` is None or zero before backward adds to it."""
        if self._started_from_zero or is_symbolic():
            return
        gradient = dense_gradient(parameter)
        self._started_from_zero = gradient is None or not bool(gradient.any())

    def _after_accumulation(self, parameter: Tensor) -> None:
        """Save a copy of ``.grad`` after backward has added to it."""
        if is_symbolic():
            return
        gradient = dense_gradient(parameter)
        if gradient is not None:
            self._accumulated[id(parameter)] = gradient.clone()

    def note_step(self, observed: ObservedOptimizer) -> None:
        """Count leaked, reversed and zeroed gradients, just before an optimizer step.

        Args:
            observed: The observations whose counts are updated.
        """
        if self._accumulated:
            observed.checked += 1
            observed.leaks = streak(observed.leaks, continues=not self._started_from_zero)
            factors = self._factors_since_backward()
            if factors and all(factor < 0 for factor in factors):
                observed.reversed += 1
            if factors and all(factor == 0 for factor in factors):
                observed.zeroed += 1
        self._accumulated.clear()
        self._started_from_zero = False

    def _factors_since_backward(self) -> list[float]:
        """Return the factor by which each watched gradient was multiplied since backward.

        The factor is the projection of the gradient onto its copy from backward: 1 if the gradient
        was not changed, below 0 if it was reversed.
        """
        factors = []
        for parameter in self._watched:
            accumulated = self._accumulated.get(id(parameter))
            current = dense_gradient(parameter)
            if accumulated is None or current is None or accumulated.shape != current.shape:
                continue
            projection = float((accumulated * current).sum())
            squared_length = float(accumulated.square().sum())
            if math.isfinite(projection) and 0 < squared_length < math.inf:
                factors.append(projection / squared_length)
        return factors

    def close(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)
