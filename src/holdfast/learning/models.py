"""What is observed of a model.

Which weights learn, in which mode it is, and whether its weights ever change.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from holdfast.learning.facts import LayerFacts, ModelFacts
from holdfast.learning.measures import can_be_observed, spread_of

_ENOUGH_WEIGHTS = 256  # to tell which distribution they were drawn from


def is_meant(name: str, pattern: str) -> bool:
    """Return whether a shell pattern of a parameter's name, or the name of a module that it is
    in, means it.
    """
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


class ModelObserver:
    """One model; `frozen` are parameters and modules that are meant not to learn, see
    `is_meant`.
    """

    def __init__(self, module: nn.Module, prefix: str, frozen: Sequence[str]) -> None:
        self.module = module
        self._prefix, self._frozen = prefix, frozen
        self._start = {key: spread_of(p).clone() for key, p in self.named() if can_be_observed(p)}
        self._facts = ModelFacts()
        # In training mode or not, since the last step
        self._passes_without_graph = {True: 0, False: 0}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with their full names."""
        lazy = nn.parameter.UninitializedParameter
        return [
            (self._prefix + k, p)
            for k, p in self.module.named_parameters()
            if not isinstance(p, lazy)
        ]

    def _modal(self) -> list[tuple[str, nn.Module]]:
        return [
            (k, m)
            for k, m in self.module.named_modules()
            if isinstance(m, (_DropoutNd, _BatchNorm))
        ]

    def note_pass_without_graph(self) -> None:
        """Count a forward pass without a graph, as evaluations make them."""
        self._passes_without_graph[self.module.training] += 1

    def note_step(self) -> None:
        """Count an observed step, and whether it was made in evaluation mode."""
        self._facts.observed += 1
        self._passes_without_graph = {True: 0, False: 0}
        if not self.module.training:
            self._facts.eval_steps += any(not m.training for _, m in self._modal())

    def note_validation(self) -> None:
        """Count a validation, and whether all of it ran in training mode."""
        passes = self._passes_without_graph
        self._facts.validations += 1
        self._facts.train_mode_validations += bool(
            passes[True] and not passes[False] and self._modal()
        )
        self._passes_without_graph = {True: 0, False: 0}

    def facts(self, held: set[int], layers: Mapping[str, LayerFacts]) -> ModelFacts:
        """Return what is known, given the ids of the parameters of all optimizers, and what was
        seen of each.
        """
        facts, named = self._facts, self.named()
        learning = [(k, p) for k, p in named if p.requires_grad and not self._is_frozen(k)]
        outside = {k: p for k, p in learning if id(p) not in held}
        never = {k: p for k, p in learning if id(p) in held and _never(layers.get(k))}
        facts.weights = sum(p.numel() for _, p in learning)
        facts.outside, facts.outside_count = list(outside)[:5], len(outside)
        facts.outside_weights = sum(p.numel() for p in outside.values())
        facts.outside_with_gradient = sum(p.grad is not None for p in outside.values())
        facts.outside_changed = self._changed(outside)
        facts.outside_drawn = self._drawn({k: p for k, p in outside.items() if p.dim() > 1})
        facts.never_gradient, facts.never_gradient_count = list(never)[:5], len(never)
        facts.never_gradient_weights = sum(p.numel() for p in never.values())
        facts.never_gradient_first = bool(never) and next(iter(never)) == learning[0][0]
        facts.symmetric = self._symmetric(learning)
        frozen = [
            (k, p)
            for k, p in named
            if k in self._start and not (p.requires_grad or self._is_frozen(k))
        ]
        still = {k: p for k, p in frozen if p.layout is torch.strided and p.dim() > 1}
        few = 0 < facts.weights < 0.05 * sum(p.numel() for p in still.values())
        drawn = (
            few
            and all(_as_drawn(p, self._start[k]) for k, p in still.items())
            and not self._changed(still)
        )
        facts.still_drawn = list(still) if drawn else []
        facts.changed = self._changed(self._start)
        running = [
            (k, b) for k, b in self.module.named_buffers() if "running" in k and can_be_observed(b)
        ]
        statistics = [
            (k, b) for k, b in running if b.layout is torch.strided and b.element_size() > 1
        ]
        facts.nonfinite_buffers = [
            self._prefix + k for k, b in statistics if not bool(torch.isfinite(b).all())
        ][:5]
        modal = self._modal()
        facts.modal = [k for k, _ in modal][:5]
        facts.dropout = max((m.p for _, m in modal if isinstance(m, _DropoutNd)), default=0.0)
        facts.batch_norm = any(isinstance(m, _BatchNorm) and m.training for _, m in modal)
        leaves = [
            m
            for m in self.module.modules()
            if not list(m.children()) and not isinstance(m, nn.Flatten)
        ]
        facts.normalised_input = bool(leaves) and "Norm" in type(leaves[0]).__name__
        return facts

    def _is_frozen(self, name: str) -> bool:
        return any(is_meant(name, pattern) for pattern in self._frozen)

    def _symmetric(self, learning: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
        tables = {
            self._prefix + k + ".weight"
            for k, m in self.module.named_modules()
            if isinstance(m, nn.Embedding)
        }
        found = []
        for name, p in learning:
            if (
                p.dim() < 2
                or p.shape[0] < 2
                or p.numel() == p.shape[0]
                or name in tables
                or p.grad is None
            ):
                continue
            # Two rows tell nearly always; reading all of a large model takes long.
            if torch.equal(p[0], p[-1]) and bool((p.detach() == p.detach()[:1]).all()):
                found.append(name)
        return found[:5]

    def _drawn(self, matrices: Mapping[str, nn.Parameter]) -> int:
        """Return how many matrices show that an initialiser drew them.

        0 where one shows that none did.
        """
        drawn = all(_as_drawn(p, self._start[k]) for k, p in matrices.items() if k in self._start)
        return sum(p.numel() >= _ENOUGH_WEIGHTS for p in matrices.values()) if drawn else 0

    def _changed(self, names: Iterable[str]) -> bool:
        now = dict(self.named())
        return any(
            name not in now
            or not torch.equal(torch.nan_to_num(spread_of(now[name])), torch.nan_to_num(then))
            for name, then in ((name, self._start[name]) for name in names if name in self._start)
        )


def _never(layer: LayerFacts | None) -> bool:
    return layer is not None and layer.steps >= 10 and layer.with_gradient == 0  # catalogue 14


def _as_drawn(weight: nn.Parameter, sample: Tensor) -> bool:
    """Return whether weights are distributed as initialisers draw them, which training blurs.

    Few may be anything.
    """
    size, values = sample.numel(), sample.double()
    spread = float(values.std()) if size > 1 else 0.0
    if size < _ENOUGH_WEIGHTS or spread == 0:
        return size < _ENOUGH_WEIGHTS
    uniform = (
        abs(float(values.abs().max()) / (math.sqrt(3) * spread) - 1) < 1.8 / math.sqrt(size) + 0.005
    )
    # Tables, transformers, convolutions
    usual = (1.0, 0.02, math.sqrt(2 / (weight.shape[0] * weight[0, 0].numel())))
    bell = abs(float((values / spread).pow(4).mean()) - 3) < 5 * math.sqrt(24 / size)
    return uniform or (
        bell and any(abs(spread / each - 1) < 3 / math.sqrt(2 * size) for each in usual)
    )
