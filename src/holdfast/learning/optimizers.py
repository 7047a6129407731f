"""What is observed of optimizers and schedulers.

Steps, rates, losses, and whether gradients start from zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.learning.eager_hooks import remove_all
from holdfast.learning.facts import OptimizerFacts, SchedulerFacts
from holdfast.learning.layers import Gradients
from holdfast.learning.measures import append_newest, dense_gradient, median, norms_of, spread_of
from holdfast.numerics.eager import is_symbolic
from holdfast.numerics.learning_rate import rate_of

START_ROUNDS = 8
"""Steps of each optimizer in which it is checked where gradients start."""
_MOST_LOSSES = 800


class OptimizerObserver:
    """One optimizer, beside models that own some parameters (by id).

    `known` is what was seen, see `facts`.
    """

    def __init__(self, optimizer: Optimizer, owned: set[int]) -> None:
        self.optimizer = optimizer
        self.pending: list[float] = []  # losses since the last step
        self.known = OptimizerFacts(kind=type(optimizer).__name__)
        self.known.lr = self.known.largest_lr = self._learning_rate()
        self._owned_at_start = {id(p) for p in self.parameters()} & owned
        self._start: AccumulationCheck | None = None
        self._stride, self._seen = 1, 0
        self._factors: list[float] = []

    def open(self) -> None:
        """Begin to check where gradients start, in the first steps."""
        if self._start is None and self.known.observed < START_ROUNDS:
            self._start = AccumulationCheck(self.parameters())

    def close(self) -> None:
        """Remove the hooks of that."""
        if self._start is not None:
            self._start.close()
            self._start = None

    def parameters(self) -> list[nn.Parameter]:
        """Return what the optimizer holds now."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _learning_rate(self) -> float:
        groups = self.optimizer.param_groups
        highest = rate_of(groups[0]) if groups else 0.0
        for group in groups:
            highest = max(highest, rate_of(group))
        return highest

    def begin_step(self, *, closure: bool) -> None:
        """Count a step, and read the learning rates (one host sync where they are tensors).

        Every step.
        """
        facts, lr = self.known, self._learning_rate()
        facts.steps += 1
        facts.closure = facts.closure or closure
        # A single step is an accident, or was undone
        facts.largest_lr = max(facts.largest_lr, min(lr, facts.lr))
        facts.zero_lr_steps = facts.zero_lr_steps + 1 if lr <= 1e-7 * facts.largest_lr else 0
        facts.low_lr_steps = facts.low_lr_steps + 1 if lr < 1e-3 * facts.largest_lr else 0
        facts.lr = lr

    def note_gradients(self, gradients: Gradients) -> None:
        """Add what was found just before an observed step."""
        facts, some = self.known, gradients.tensors > 0
        facts.observed += 1
        facts.no_gradient_steps = 0 if some else facts.no_gradient_steps + 1
        facts.with_gradient_steps += some
        facts.zero_gradient_steps = (
            facts.zero_gradient_steps + 1 if some and gradients.total_norm == 0 else 0
        )
        # The first 30 stay for the start of training; of the rest the newest.
        facts.gradient_norms.append(gradients.total_norm)
        del facts.gradient_norms[30 : len(facts.gradient_norms) - 370]
        if gradients.nonfinite:
            facts.nonfinite_gradients += 1
            facts.first_nonfinite_gradient = facts.first_nonfinite_gradient or facts.steps
            facts.nonfinite_names = facts.nonfinite_names or gradients.nonfinite
        if self._start is not None:
            self._note_start(self._start)

    def _note_start(self, start: AccumulationCheck) -> None:
        arrived, clean, factors = start.at_step()
        if not arrived:
            return
        facts = self.known
        facts.checked += 1
        facts.leaks = 0 if clean else facts.leaks + 1
        if factors:
            facts.reversed += all(factor < 0 for factor in factors)
            facts.zeroed += all(factor == 0 for factor in factors)
            append_newest(self._factors, max(factors))

    def end_step(self, *, moved: bool, has_loss: bool) -> None:
        """End a step that was seen to move weights or not.

        Its loss is that of the newest backward pass, or given.
        """
        self.known.moved += moved
        if self.pending and not has_loss:
            self.add_loss(self.pending[-1])
        self.pending.clear()
        if self._start is not None and self.known.observed >= START_ROUNDS:
            self.close()

    def add_loss(self, value: float) -> None:
        """Add the loss of this step; one that is not finite is only counted."""
        facts = self.known
        if not math.isfinite(value):
            facts.nonfinite_losses += 1
            facts.first_nonfinite_loss = facts.first_nonfinite_loss or facts.steps
            return
        self._seen += 1
        if self._seen % self._stride == 0:
            facts.losses.append((facts.steps, value))
        if len(facts.losses) > _MOST_LOSSES:
            facts.losses, self._stride = facts.losses[::2], self._stride * 2

    def facts(self, owned: set[int], *, windows: bool = True) -> OptimizerFacts:
        """Return what is known, given the ids of the models' parameters.

        Without `windows` only for contracts.
        """
        facts, held = self.known, self.parameters()
        foreign = [p for p in held if id(p) not in owned]
        facts.tensors = len(held)
        facts.frozen = sum(not p.requires_grad for p in held)
        facts.foreign = len(foreign)
        facts.foreign_with_gradient = sum(p.grad is not None for p in foreign)
        facts.replaced = sum(id(p) in self._owned_at_start for p in foreign)
        groups = self.optimizer.param_groups
        facts.maximize = any(group.get("maximize", False) for group in groups[:1])
        facts.weight_decay = max(
            (float(group.get("weight_decay") or 0) for group in groups), default=0.0
        )
        if windows or facts.nonfinite_gradients or facts.nonfinite_losses:
            facts.nonfinite_state = self._nonfinite_state()
        facts.scaled, facts.scaled_share = median(self._factors), _scaled_share(self._factors)
        return facts

    def _nonfinite_state(self) -> list[str]:
        """Return which entries of the optimizer's state, such as ``exp_avg``, hold NaN or Inf."""
        found = [
            (key, spread_of(value))
            for state in self.optimizer.state.values()
            # Some optimizers keep numbers of their own beside the state of parameters.
            if isinstance(state, Mapping)
            for key, value in state.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
        ]
        largest = norms_of([sample for _, sample in found], math.inf)
        return sorted(
            {key for (key, _), most in zip(found, largest, strict=True) if not math.isfinite(most)}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what later judgements need of the past, as plain data."""
        steps, losses = ([point[index] for point in self.known.losses] for index in (0, 1))
        return {"steps": self.known.steps, "loss_steps": steps, "losses": losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.known.steps = int(state["steps"])
        points = zip(state["loss_steps"], state["losses"], strict=True)
        self.known.losses = [(int(step), float(loss)) for step, loss in points]


def _scaled_share(factors: Sequence[float]) -> float:
    # A gradient divided by the number of micro-batches is scaled by the same factor in each step;
    # clipping is not.
    usual = median(factors) or 0.0
    steady = sum(abs(f - usual) <= 1e-3 * abs(usual) for f in factors)
    return (
        0.0 if steady > len(factors) / 2 else sum(f < 0.999 for f in factors) / max(1, len(factors))
    )


class AccumulationCheck:
    """Sees whether gradients start from zero between two steps of one optimizer, and what happens
    to them after.

    A tensor hook runs before a gradient is added to what is there, a post-accumulate hook after. It
    watches the smallest parameters, which is enough since `zero_grad` clears all.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        learning = [
            p for p in parameters if p.requires_grad and p.is_leaf and 0 < p.numel() <= 10**6
        ]
        self._watched = sorted(learning, key=lambda p: p.numel())[:3]
        self._summed: dict[int, Tensor] = {}
        self._clean = False
        self._handles: list[RemovableHandle] = []
        for parameter in self._watched:
            arrives = parameter.register_hook(partial(self._arrives, parameter))  # type: ignore[no-untyped-call]
            summed = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            self._handles += [arrives, summed]

    def _arrives(self, parameter: Tensor, _gradient: Tensor) -> None:
        if not (is_symbolic() or self._clean):
            before = dense_gradient(parameter)
            self._clean = before is None or not bool(before.any())

    def _accumulated(self, parameter: Tensor) -> None:
        summed = None if is_symbolic() else dense_gradient(parameter)
        if summed is not None:
            self._summed[id(parameter)] = summed.clone()

    def at_step(self) -> tuple[bool, bool, list[float]]:
        """Return whether gradients came, whether one began from zero, and factors; then begin anew.

        A factor projects the gradient at the step on the accumulated one; 1: untouched, below 0:
        reversed.
        """
        factors = []
        for parameter in self._watched:
            before, now = self._summed.get(id(parameter)), dense_gradient(parameter)
            if before is not None and now is not None and before.shape == now.shape:
                dot, length = float((before * now).sum()), float(before.square().sum())
                if math.isfinite(dot) and 0 < length < math.inf:
                    factors.append(dot / length)
        found = bool(self._summed), self._clean, factors
        self._summed.clear()
        self._clean = False
        return found

    def close(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)


class SchedulerObserver:
    """One scheduler, a torch one or anything with ``last_epoch``.

    How often it is advanced between steps.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._start = self._last = self._count()
        period = getattr(scheduler, "T_max", None) or getattr(scheduler, "step_size", None)
        self.known = SchedulerFacts(
            kind=type(scheduler).__name__,
            patience=getattr(scheduler, "patience", None),
            period=period if isinstance(period, int) else None,
        )

    def _count(self) -> int:
        return int(getattr(self.scheduler, "last_epoch", 0))

    def note_step(self) -> None:
        """Compare with the last step of the optimizer; every step."""
        now, facts = self._count(), self.known
        advanced = now - self._last
        if facts.optimizer_steps == 0:
            facts.before_first = advanced
        else:
            facts.every_step += advanced == 1
            facts.several += advanced > 1
        facts.optimizer_steps += 1
        facts.advanced = now - self._start
        self._last = now
