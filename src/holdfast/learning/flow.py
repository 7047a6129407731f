"""How gradients and updates flow: norms for each parameter, what moved, dead units, leaked gradients.

Only measures, in sampled steps; nothing is changed and no random number is drawn. What a number means is judged by
the rules in ``diagnose``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from holdfast.numerics.eager import is_symbolic

_MOST_CALLS = 8
"""Calls of one activation in one pass that are looked at: a recurrent loop makes hundreds, much alike."""
_SAMPLE = 4096
"""Elements of each tensor that are copied to see what a step moved: 16 KiB a tensor, whatever the model's size."""


def sample_of(tensor: Tensor) -> Tensor:
    """Return a copy of at most 4096 elements, spread over a tensor, shape ``(n,)``."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()[:_SAMPLE]
    return flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].clone()


def dense_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient's values, of a sparse one the stored ones."""
    gradient = parameter.grad
    if gradient is None:
        return None
    return gradient.coalesce().values().detach() if gradient.is_sparse else gradient.detach()


def norms_of(tensors: Iterable[Tensor], order: float = 2) -> list[float]:
    """Return the norm of each tensor, computed in at least fp32; one host sync."""
    each = [
        torch.linalg.vector_norm(
            t, order, dtype=None if t.dtype == torch.float64 or t.is_complex() else torch.float32
        )
        for t in tensors
    ]
    return torch.stack([norm.double().cpu() for norm in each]).tolist() if each else []


@dataclass(slots=True)
class LayerFlow:
    """What was seen of one parameter.

    Args:
        elements: Numbers in it.
        dims: Its axes.
        steps: Observed steps in which its optimizer stepped.
        with_gradient: Those in which it had a gradient.
        zero_gradient: Those in which the gradient was exactly 0.
        unmoved: Those in which it had a gradient, and no sampled element changed.
        ratios: Recent lengths of a step relative to the length of the parameter.
        gradient_rms: Recent root mean squares of the gradient's elements.
        weight_rms: The same for the weights, first and last.
    """

    elements: int
    dims: int
    steps: int = 0
    with_gradient: int = 0
    zero_gradient: int = 0
    unmoved: int = 0
    nonfinite: bool = False
    ratios: list[float] = field(default_factory=list)
    gradient_rms: list[float] = field(default_factory=list)
    weight_rms: list[float] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return medians and counts, as plain data."""
        return {
            "elements": self.elements,
            "dims": self.dims,
            "steps": self.steps,
            "with_gradient": self.with_gradient,
            "zero_gradient": self.zero_gradient,
            "unmoved": self.unmoved,
            "nonfinite": self.nonfinite,
            "ratio": median(self.ratios),
            "largest_ratio": max(self.ratios[:30], default=None),
            "gradient_rms": median(self.gradient_rms),
            "first_weight_rms": self.weight_rms[0] if self.weight_rms else None,
            "last_weight_rms": self.weight_rms[-1] if self.weight_rms else None,
        }


def median(values: list[float]) -> float | None:
    """Return the middle of the finite values, None if there are none."""
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else None


class Flow:
    """Gradients and updates of every parameter, over the observed steps.

    Args:
        names: The name of each parameter, by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self.layers: dict[str, LayerFlow] = {}
        self._before: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self.totals: dict[str, list[float]] = {}

    def before_step(self, optimizer: str, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
        """Look at the gradients of the step that an optimizer is about to make.

        Returns:
            ``tensors`` with a gradient, the ``total`` norm, and the names with a ``nonfinite`` gradient.
        """
        moving, gradients = [], []
        self._before.clear()
        for place, parameter in enumerate(parameters):
            name = self._names.get(id(parameter), f"{optimizer}[{place}]")
            layer = self.layers.setdefault(name, LayerFlow(parameter.numel(), parameter.dim()))
            layer.steps += 1
            gradient = dense_gradient(parameter)
            if gradient is None or parameter.is_meta or not (parameter.is_floating_point() and gradient.numel()):
                continue
            moving.append((name, parameter, layer, gradient.numel()))
            gradients.append(gradient)
            self._before[name] = parameter, sample_of(parameter)
        norms = norms_of([*gradients, *(parameter.detach() for _, parameter, _, _ in moving)])
        for (_, parameter, layer, count), norm, weight in zip(moving, norms, norms[len(moving) :], strict=False):
            layer.with_gradient += 1
            layer.zero_gradient += norm == 0
            _keep(layer.gradient_rms, norm / math.sqrt(count))
            layer.weight_rms[1:] = [weight / math.sqrt(max(1, parameter.numel()))]
        total = math.hypot(*norms[: len(moving)]) if moving else 0.0
        _keep(self.totals.setdefault(optimizer, []), total, 400)
        # The square of a finite gradient of 1e20 is not finite: look again.
        bad = [
            name
            for (name, *_), norm, gradient in zip(moving, norms, gradients, strict=False)
            if not (math.isfinite(norm) or bool(gradient.isfinite().all()))
        ]
        return {"tensors": len(moving), "total": total, "nonfinite": bad[:5], "nonfinite_count": len(bad)}

    def after_step(self) -> dict[str, Any]:
        """Compare the weights with those before the step.

        Returns:
            The names with ``nonfinite`` weights, and whether anything ``moved``.
        """
        names = list(self._before)
        now = [sample_of(parameter) for parameter, _ in self._before.values()]
        then = [sample for _, sample in self._before.values()]
        self._before.clear()
        norms = norms_of([*(a - b for a, b in zip(now, then, strict=True)), *then])
        moved = False
        bad = []
        for name, step, weight in zip(names, norms, norms[len(names) :], strict=False):
            layer = self.layers[name]
            layer.unmoved += step == 0
            moved = moved or step != 0
            if not math.isfinite(step):
                bad.append(name)
                layer.nonfinite = True
            elif weight > 0:
                _keep(layer.ratios, step / weight)
        return {"nonfinite": bad[:5], "moved": moved}

    def forget_step(self) -> None:
        """Drop what was noted before a step that was then not made."""
        self._before.clear()

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return what was seen by parameter, as plain data, in the order of the model."""
        return {name: layer.facts() for name, layer in self.layers.items()}


def _keep(values: list[float], value: float, most: int = 120) -> None:
    # The first 30 stay for the start of training; of the rest the newest.
    values.append(value)
    if len(values) > most:
        del values[30]


class Activity:
    """Which units of each rectifier were ever active, and how much of each tanh and sigmoid sits at its bounds."""

    def __init__(self) -> None:
        self._saturated: dict[str, list[float]] = {}
        self._alive: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}
        self._closed: dict[str, list[float]] = {}
        self._in_step: dict[str, int] = {}

    def begin_step(self) -> None:
        """Start to number the rectifiers of a step anew."""
        self._in_step.clear()

    def note(self, function: str, module: str, output: Tensor) -> None:
        """Add the output of ``relu``, ``tanh`` or ``sigmoid``.

        Args:
            function: Its name.
            module: In which it was called, ``""`` if in none.
            output: Shape ``(batch, units)``, ``(batch, units, h, w)`` or ``(..., units)``.
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
        known = self._alive.get(key)
        if known is not None and known.shape != alive.shape:
            return
        self._alive[key] = alive if known is None else known | alive
        self._steps[key] = self._steps.get(key, 0) + 1
        if self._steps[key] % 20 == 0:
            self._closed.setdefault(key, []).append(1 - float(self._alive.pop(key).float().mean()))
            del self._closed[key][:-3]

    def dead(self) -> dict[str, list[float]]:
        """Return the share of dead units in the last three windows of 20 steps, by rectifier."""
        return {key: list(shares) for key, shares in self._closed.items()}

    def saturated(self) -> dict[str, float]:
        """Return the usual share of values within a hundredth of the bounds, by tanh or sigmoid."""
        return {key: median(shares) or 0.0 for key, shares in self._saturated.items()}


class Sentinel:
    """Tells whether gradients start from zero between two steps of one optimizer, and what happens to them after.

    A tensor hook keeps the gradient that arrives, a post-accumulate hook compares: equal means that accumulation
    started from nothing. It watches the smallest parameters, which is enough since `zero_grad` clears all.

    Args:
        parameters: Of one optimizer.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        learning = [p for p in parameters if p.requires_grad and p.is_leaf and 0 < p.numel() <= 10**6]
        self._watched = sorted(learning, key=lambda p: p.numel())[:3]
        self._arrived: dict[int, Tensor] = {}
        self._summed: dict[int, Tensor] = {}
        self._clean: set[int] = set()
        self._handles: list[RemovableHandle] = []
        for parameter in self._watched:
            arrives = parameter.register_hook(self._keeper(id(parameter)))  # type: ignore[no-untyped-call]
            summed = parameter.register_post_accumulate_grad_hook(self._compare)  # type: ignore[no-untyped-call]
            self._handles += [arrives, summed]

    def _keeper(self, key: int) -> Any:
        def keep(gradient: Tensor) -> None:
            if is_symbolic():
                return
            self._arrived[key] = gradient.detach().clone()

        return keep

    def _compare(self, parameter: Tensor) -> None:
        if is_symbolic():
            return
        arrived, summed = self._arrived.pop(id(parameter), None), dense_gradient(parameter)
        if arrived is None or summed is None:
            return
        if arrived.is_sparse:
            arrived = arrived.coalesce().values()
        same = arrived.shape == summed.shape and torch.equal(
            torch.nan_to_num(arrived), torch.nan_to_num(summed.to(arrived.dtype))
        )
        if same:
            self._clean.add(id(parameter))
        self._summed[id(parameter)] = summed.clone()

    def at_step(self) -> dict[str, Any]:
        """Return what happened since the last step of this optimizer, and start anew.

        Returns:
            ``arrived``: whether gradients came; ``clean``: whether an accumulation began from zero; ``factors``:
            the projection of the gradient at the step on the accumulated one (1: untouched, below 0: reversed).
        """
        factors = []
        for parameter in self._watched:
            before, now = self._summed.get(id(parameter)), dense_gradient(parameter)
            if before is not None and now is not None and before.shape == now.shape:
                dot, length = float((before * now).sum()), float(before.square().sum())
                if math.isfinite(dot) and 0 < length < math.inf:
                    factors.append(dot / length)
        found = {"arrived": bool(self._summed), "clean": bool(self._clean), "factors": factors}
        self._summed.clear()
        self._clean.clear()
        return found

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of this optimizer only makes its state, as torch.distributed.checkpoint asks for it.

    That is a step with a learning rate of 0 and gradients of 0. Cost: a host sync, but only where the rate is 0.
    """
    try:
        if any(float(group.get("lr", 1.0)) != 0.0 for group in optimizer.param_groups):
            return False
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return bool(gradients) and not any(getattr(g, "_local_tensor", g).any() for g in gradients)
    except Exception:  # noqa: BLE001 - whatever they are, they are not plain zeros
        return False
