"""`AccumulationCheck`: do gradients start from zero and reach the optimizer step unchanged?"""

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

# How many parameters are watched. `zero_grad` clears all of them, so a few small ones are enough.
WATCHED_PARAMETERS = 3
# Parameters with more elements than this are not watched, since their gradients are copied.
MAX_ELEMENTS = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What happened to the watched gradients in one step.

    Args:
        arrived: Whether backward delivered any gradient.
        started_from_zero: Whether at least one was added to None or to zeros.
        reversed: Whether all of them were reversed between backward and step.
        zeroed: Whether all of them were set to zero between backward and step.
    """

    arrived: bool
    started_from_zero: bool
    reversed: bool
    zeroed: bool


class AccumulationCheck:
    """Checks that gradients start from zero, and that they reach the optimizer step unchanged.

    A tensor hook runs before a gradient is added to ``.grad``, a post-accumulate hook afterwards.
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
        # Copies of the gradients as backward left them, by parameter id.
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
        """Return what was observed since the last step, and start over."""
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
        """Return the factor by which each watched gradient has been scaled since backward.

        The gradient is projected onto its copy from backward: 1 if untouched, below 0 if reversed.
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
