"""How gradients and updates flow: norms for each parameter, what moved, and which units are active.

Only measures, in sampled steps; nothing is changed and no random number is drawn. Rules judge what
a number means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from holdfast.learning.facts import LayerFacts
from holdfast.learning.measures import dense_gradient, median, norms_of, spread_of

_WEIGHTS = 1024  # compared of a parameter: each lies in a cache line of its own
_FIRST = 12  # compared steps that count as the start of training
# Steps over which a unit is judged: fewer if they hold so many values
_WINDOW, _WINDOW_VALUES = range(5, 21), 192
_MOST_CALLS = 8
"""Calls of one activation in one pass that are looked at.

A recurrent loop makes hundreds, much alike.
"""


class Gradients(NamedTuple):
    """The gradients of one step of one optimizer."""

    tensors: int
    total_norm: float
    nonfinite: list[str]


class LayerObserver:
    """Gradients and updates of every parameter, over the observed steps.

    `names` are those of parameters, by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._layers: dict[str, LayerFacts] = {}
        self._ratios: dict[str, list[float]] = {}
        self._gradient_rms: dict[str, list[float]] = {}
        self._before: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def before_step(
        self,
        optimizer: str,
        parameters: Iterable[nn.Parameter],
        norms: Mapping[int, float] | None = None,
        *,
        weights: bool = True,
    ) -> Gradients:
        """Look at the gradients of the step to come, and at the weights if wanted.

        `norms`: known ones, by id.
        """
        moving, gradients = [], []
        self._before.clear()
        for place, parameter in enumerate(parameters):
            name = self._names.get(id(parameter), f"{optimizer}[{place}]")
            layer = self._layers.setdefault(
                name, LayerFacts(elements=parameter.numel(), dims=parameter.dim())
            )
            layer.steps += 1
            gradient = dense_gradient(parameter)
            if (
                gradient is None
                or parameter.is_meta
                or not (parameter.is_floating_point() and gradient.numel())
            ):
                continue
            moving.append((name, layer, parameter))
            gradients.append(gradient)
        known = [norms[id(p)] for _, _, p in moving if id(p) in norms] if norms else []
        lengths = known if len(known) == len(moving) else norms_of(gradients)
        nonfinite = []
        for (name, layer, _), gradient, norm in zip(moving, gradients, lengths, strict=True):
            layer.with_gradient += 1
            layer.zero_gradient += norm == 0
            _keep(self._gradient_rms, name, norm / math.sqrt(gradient.numel()))
            # The square of a finite gradient of 1e20 is not finite: look again.
            if not (math.isfinite(norm) or bool(gradient.isfinite().all())):
                nonfinite.append(name)
        if weights or nonfinite:
            self._before = {name: (p, spread_of(p, _WEIGHTS).clone()) for name, _, p in moving}
        return Gradients(len(moving), math.hypot(*lengths), nonfinite[:5])

    def after_step(self) -> bool:
        """Compare the weights with those before the step; return whether anything moved."""
        names = list(self._before)
        then = [sample for _, sample in self._before.values()]
        steps = [
            spread_of(parameter, _WEIGHTS) - sample for parameter, sample in self._before.values()
        ]
        self._before = {}
        norms = norms_of([*steps, *then])
        moved = False
        for name, sample, step, weight in zip(
            names, then, norms, norms[len(names) :], strict=False
        ):
            layer = self._layers[name]
            layer.compared += 1
            layer.unmoved += step == 0
            moved = moved or step != 0
            layer.last_weight_rms = weight / math.sqrt(sample.numel())
            if layer.first_weight_rms is None:
                layer.first_weight_rms = layer.last_weight_rms
            if not math.isfinite(step):
                layer.nonfinite = True
            elif weight > 0:
                _keep(self._ratios, name, step / weight)
        return moved

    def facts(self, *, windows: bool = True) -> dict[str, LayerFacts]:
        """Return what was seen by parameter, in the order of the model.

        Medians as they were without `windows`.
        """
        for name, layer in self._layers.items() if windows else ():
            ratios = self._ratios.get(name, [])
            layer.ratio, layer.largest_ratio = median(ratios), max(ratios[:_FIRST], default=None)
            layer.gradient_rms = median(self._gradient_rms.get(name, []))
        return dict(self._layers)


def _keep(kept: dict[str, list[float]], name: str, value: float) -> None:
    # The first 30 stay for the start of training; of the rest the newest.
    values = kept.setdefault(name, [])
    values.append(value)
    if len(values) > 120:
        del values[30]


class ActivationObserver:
    """Which units of each rectifier were ever active, and how much of each tanh and sigmoid sits
    at its bounds.
    """

    def __init__(self) -> None:
        self._saturated: dict[str, list[float]] = {}
        # Steps and values of the window, units active in it
        self._alive: dict[str, tuple[int, int, Tensor]] = {}
        self._dead: dict[str, list[float]] = {}
        self._in_step: dict[str, int] = {}

    def begin_pass(self) -> None:
        """Start to number the activations of a pass anew."""
        self._in_step.clear()

    def note(self, function: str, module: str, output: Tensor) -> None:
        """Add the output of ``relu``, ``tanh`` or ``sigmoid``, called in a module (``""``.

        In none).

        Its shape is ``(batch, units)``, ``(batch, units, h, w)`` or ``(..., units)``.
        """
        name = module or function
        order = self._in_step[name] = self._in_step.get(name, 0) + 1
        if output.dim() < 2 or output.numel() == 0 or order > _MOST_CALLS:
            return
        key = f"{name}#{order}" if order > 1 or not module else module
        if function == "relu":
            self._note_rectifier(key, output)
        elif function == "sigmoid" and output.shape[-1] < 8:
            return  # a probability near its bounds is an answer, not a dead gate
        elif len(self._saturated.setdefault(key, [])) < 120:
            low = -0.99 if function == "tanh" else 0.01
            self._saturated[key].append(float(((output < low) | (output > 0.99)).float().mean()))

    def _note_rectifier(self, key: str, output: Tensor) -> None:
        axis = 1 if output.dim() in (2, 4, 5) else output.dim() - 1
        alive = output.detach().amax([other for other in range(output.dim()) if other != axis]) > 0
        steps, values, known = self._alive.get(key, (0, 0, alive))
        if known.shape != alive.shape:
            return
        steps, values, known = steps + 1, values + output.numel() // alive.numel(), known | alive
        self._alive[key] = steps, values, known
        if steps in _WINDOW and (values >= _WINDOW_VALUES or steps == _WINDOW[-1]):
            del self._alive[key]
            self._dead.setdefault(key, []).append(1 - float(known.float().mean()))
            del self._dead[key][:-3]

    def dead(self) -> dict[str, list[float]]:
        """Return the share of dead units in the last three windows, by rectifier."""
        return {key: list(shares) for key, shares in self._dead.items()}

    def saturated(self) -> dict[str, float]:
        """Return the usual share of values within a hundredth of the bounds, by tanh or sigmoid."""
        return {key: median(shares) or 0.0 for key, shares in self._saturated.items()}
