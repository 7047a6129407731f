"""`AccumulationCheck`: where gradients start from, and what happens to them before the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from holdfast.learning.eager_hooks import remove_all
from holdfast.learning.measures import dense_gradient
from holdfast.numerics.eager import is_symbolic

# Parameters that are watched. `zero_grad` clears all alike, so a few small ones are enough.
WATCHED_PARAMETERS = 3
# Elements of a parameter up to which it is copied.
MOST_ELEMENTS = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How the gradients of one step came about.

    Args:
        arrived: Whether any gradient was seen to arrive.
        started_from_zero: Whether one of them was added to nothing or to zeros.
        reversed: Whether all of them were reversed between backward and step.
        zeroed: Whether all of them were set to zero between backward and step.
    """

    arrived: bool
    started_from_zero: bool
    reversed: bool
    zeroed: bool


class AccumulationCheck:
    """Sees whether gradients start from zero in each step, and whether they reach the step.

    A tensor hook runs before a gradient is added to what is there, a post-accumulate hook after it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        learning = [
            parameter
            for parameter in parameters
            if parameter.requires_grad
            and parameter.is_leaf
            and 0 < parameter.numel() <= MOST_ELEMENTS
        ]
        self._watched = sorted(learning, key=lambda parameter: parameter.numel())
        del self._watched[WATCHED_PARAMETERS:]
        # Copies of the gradients as backward left them, by the id of the parameter.
        self._accumulated: dict[int, Tensor] = {}
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
        if self._started_from_zero or is_symbolic():
            return
        present = dense_gradient(parameter)
        self._started_from_zero = present is None or not bool(present.any())

    def _after_accumulation(self, parameter: Tensor) -> None:
        if is_symbolic():
            return
        gradient = dense_gradient(parameter)
        if gradient is not None:
            self._accumulated[id(parameter)] = gradient.clone()

    def at_step(self) -> Arrival:
        """Return what was seen since the last step, and start again."""
        factors = self._factors()
        arrival = Arrival(
            arrived=bool(self._accumulated),
            started_from_zero=self._started_from_zero,
            reversed=bool(factors) and all(factor < 0 for factor in factors),
            zeroed=bool(factors) and all(factor == 0 for factor in factors),
        )
        self._accumulated.clear()
        self._started_from_zero = False
        return arrival

    def _factors(self) -> list[float]:
        """Return by what each watched gradient was multiplied between backward and now.

        The gradient is projected on what backward left: 1 for an untouched gradient, less than 0
        for a reversed one.
        """
        factors = []
        for parameter in self._watched:
            then = self._accumulated.get(id(parameter))
            now = dense_gradient(parameter)
            if then is None or now is None or then.shape != now.shape:
                continue
            projection = float((then * now).sum())
            squared_length = float(then.square().sum())
            if math.isfinite(projection) and 0 < squared_length < math.inf:
                factors.append(projection / squared_length)
        return factors

    def close(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)
