"""`Comparison`: compare the gradient of a set of samples with that of its two parts, once.

The parts receive the same random numbers for their samples as the whole set, if `Draws` can repeat
them. ``comparer`` chooses what to compare, and what to do if that is impossible.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from holdfast.guard.splitting.trial.draws import Draws
from holdfast.guard.splitting.trial.evaluation import LossEvaluator, Parts
from holdfast.guard.splitting.trial.split_result import CheckOutcome, Draw, SplitCheckResult
from holdfast.guard.splitting.two_pass import TwoPass, TwoPassRun
from holdfast.guard.splitting.weighting import SAMPLES, Weighting, shares
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.trees import same
from holdfast.numerics.loss import Terms, without_graph

# If a loss is a mean plus a small sum, splitting changes the gradient of a few samples by less than
# the tolerance, but the error grows with the batch. On the CPU in fp32, the gradients or the losses
# must therefore differ by less than these limits. Rounding never exceeds both of them.
_FP32_GRADIENT_LIMIT = 2e-5
_FP32_LOSS_LIMIT = 3e-6
# On accelerators and in half precision, losses must agree within this share of the tolerance. The
# terms of a loss do not cancel out, so rounding affects losses less than gradients.
_LOSS_SHARE_OF_TOLERANCE = 0.1
_NOT_REPEATABLE = (
    "when called again, the loss has a different gradient: it carries state, or its random numbers"
    " cannot be repeated for parts of the batch (a permutation, a numpy generator), so no trial can"
    " show whether the parts add up to the whole"
)
# What is compared: gradients, or only losses if memory is too short for gradients.
Quantity: TypeAlias = Literal["gradients", "losses"]


class _LossFacts(NamedTuple):
    """What a call of the loss function with all samples has shown."""

    # Whether the loss function declares items, or is a `TwoPass`.
    declared: bool
    # Whether it changes the tensors of its batch in place.
    changes_batch: bool


class _Losses(NamedTuple):
    """The weighted losses of all parts, and what their computation has shown."""

    values: list[torch.Tensor]
    facts: _LossFacts

    def total(self) -> float:
        """Return the sum of the losses."""
        return math.fsum(float(loss.detach()) for loss in self.values)


class _SplitDifference(NamedTuple):
    """The relative differences between the whole set of samples and its parts."""

    # The L2 norm of the difference between the gradients, relative to that of the whole gradient.
    # NaN if the whole gradient is zero or not finite.
    of_gradients: float
    # The difference of the losses, relative to the whole loss.
    of_losses: float
    # What the pass over the whole set has shown about the loss function.
    facts: _LossFacts
    # The names of states whose final values differ between a pass over the whole set and passes
    # over its parts.
    differing_states: tuple[str, ...] = ()


class _Judgment(NamedTuple):
    """What a comparison shows; see the fields of `SplitCheckResult`."""

    outcome: CheckOutcome
    draws: Draw
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compares one set of samples with its parts, under several weightings."""

    evaluator: LossEvaluator
    # The whole set of samples, as a single part.
    whole: Parts
    # The parts of the set.
    parts: Parts
    # Whether to compare gradients or losses.
    quantity: Quantity
    # The seed for the random numbers of the whole set.
    seed: int
    # Repeats the random numbers of the whole set in the parts. None repeats no numbers.
    draws: Draws | None
    # Whether splitting kept the gradients of earlier batches.
    has_passed: bool

    def run(self, weightings: Sequence[Weighting]) -> SplitCheckResult:
        """Compare the samples with their parts under each weighting.

        Args:
            weightings: The candidates for the weighting. They are ignored if the loss function
                declares items.
        """
        by_samples = self._difference(self.parts, SAMPLES)
        declared, changes_batch = by_samples.facts
        if math.isnan(by_samples.of_gradients):
            return SplitCheckResult(
                outcome="unknown",
                declared=declared,
                changes_batch=changes_batch,
                why="the gradient of the samples is zero or not finite",
            )
        differences: dict[Weighting, _SplitDifference] = {}
        if not declared:
            differences = self._differences_by_weighting(weightings, by_samples)
        held = {
            weighting: difference
            for weighting, difference in differences.items()
            if self._is_rounding_difference(difference)
        }
        is_reproduced = self._is_rounding_difference(by_samples) if declared else bool(held)
        repetition = None
        if not is_reproduced and not self._draws_outside_torch():
            repetition = self._repeat_whole()
        judgment = self._judge(
            is_reproduced=is_reproduced, repetition=repetition, declared=declared
        )
        return SplitCheckResult(
            outcome=judgment.outcome,
            draws=judgment.draws,
            why=judgment.why,
            difference=next(iter(held.values()), by_samples).of_gradients,
            declared=declared,
            changes_batch=changes_batch,
            changed_buffer=_first_differing_state([by_samples, *differences.values(), repetition]),
            held=tuple(held),
            failed=tuple(weighting for weighting in differences if weighting not in held),
        )

    def _differences_by_weighting(
        self, weightings: Sequence[Weighting], by_samples: _SplitDifference
    ) -> dict[Weighting, _SplitDifference]:
        """Return the difference between the whole set and its parts under each weighting.

        Weightings under which all samples have weight 0 cannot be tried, so they are left out.

        Args:
            weightings: The candidates for the weighting.
            by_samples: The difference under the weighting `SAMPLES`.
        """
        # Weightings that give the parts the same weights are compared only once.
        by_weights = {shares(SAMPLES, self.parts): by_samples}
        differences = {}
        for weighting in weightings:
            weights = shares(weighting, self.parts)
            if weights is None:
                continue
            if weights not in by_weights:
                by_weights[weights] = self._difference(self.parts, weighting)
            differences[weighting] = by_weights[weights]
        return differences

    # --- judging

    def _judge(
        self, *, is_reproduced: bool, repetition: _SplitDifference | None, declared: bool
    ) -> _Judgment:
        """Return what the comparison shows about splitting.

        Args:
            is_reproduced: Whether the parts have reproduced the gradient of the whole set.
            repetition: The difference between two passes over the whole set. None if the loss is
                reproduced, or draws numbers that cannot be repeated.
            declared: Whether the loss function declares items.
        """
        draws = _kind_of_draws(self.draws)
        if is_reproduced:
            return _Judgment("exact" if draws == "none" else "random", draws)
        if repetition is not None and self._is_rounding_difference(repetition):
            return _Judgment("coupled", draws)
        # The whole set gives a different result when it is evaluated again, so the difference
        # between the set and its parts proves nothing.
        if declared:
            return _Judgment("random", "unknown")
        return _Judgment("coupled", "unknown", _NOT_REPEATABLE)

    def _draws_outside_torch(self) -> bool:
        """Return whether the loss has drawn numbers from the generators of Python or numpy."""
        return self.draws is not None and self.draws.outside_torch

    def _repeat_whole(self) -> _SplitDifference:
        """Return the difference between two passes over the whole set with different numbers.

        Raises:
            RuntimeError: For a `TwoPass` that differs even with the same numbers. The check fails,
                so batches are not split, and the message is recorded as the reason.
        """
        if self.evaluator.is_two_pass():
            repetition = self._difference(self.whole, SAMPLES)
            if not self._is_rounding_difference(repetition):
                raise RuntimeError(
                    "the outputs of a TwoPass draw from a generator of their own, which the two"
                    " passes share"
                )
        return self._difference(self.whole, SAMPLES, seed_offset=1)

    def _is_rounding_difference(self, difference: _SplitDifference) -> bool:
        """Return whether a difference is small enough to be due to rounding.

        NaN counts as too large.
        """
        # Not written with `>`, which is False for NaN.
        if not difference.of_gradients <= self.evaluator.tolerance():
            return False
        if not self.evaluator.has_exact_fp32():
            return True
        return (
            difference.of_gradients <= _FP32_GRADIENT_LIMIT
            or difference.of_losses <= _FP32_LOSS_LIMIT
        )

    def _losses_are_equal(self, expected: float, loss: float) -> bool:
        """Return whether two losses are equal up to rounding.

        If they are, and splitting has kept the gradients of earlier batches, the gradients are not
        compared. Near a minimum, the gradients of samples cancel out, and only rounding errors
        remain. A loss near zero consists mostly of the rounding errors of its logits. Neither shows
        that samples are coupled.
        """
        limit = _FP32_LOSS_LIMIT
        if not self.evaluator.has_exact_fp32():
            limit = self.evaluator.tolerance() * _LOSS_SHARE_OF_TOLERANCE
        return abs(loss - expected) <= limit * max(1.0, abs(expected))

    # --- measuring

    def _difference(
        self, parts: Parts, weighting: Weighting, *, seed_offset: int = 0
    ) -> _SplitDifference:
        """Return how much the whole set of samples and some parts differ.

        Args:
            parts: The parts of the set, or the whole set again.
            weighting: How to weight the parts, unless items are declared.
            seed_offset: Seed offset for the parts. With 0, they draw the same numbers as the whole
                set.
        """
        if self.quantity == "losses":
            return self._difference_of_losses(parts, weighting, seed_offset)
        return self._difference_of_gradients(parts, weighting, seed_offset)

    def _difference_of_gradients(
        self, parts: Parts, weighting: Weighting, seed_offset: int
    ) -> _SplitDifference:
        """Return the differences in gradient and loss; see `_difference`."""
        evaluator = self.evaluator
        evaluator.clear_gradients()
        self._start_whole()
        expected_loss, facts = self._accumulate_whole()
        norm = evaluator.gradient_norm()
        states_after_whole = evaluator.states.now()
        if not math.isfinite(norm) or norm == 0:
            return _SplitDifference(math.nan, 0.0, facts)
        # The gradients of the parts are added to the negated gradient of the whole set, which
        # leaves the difference.
        evaluator.negate_gradients()
        evaluator.restore_start(self.seed + seed_offset)
        loss = self._accumulate(parts, weighting)
        states_after_parts = evaluator.states.now()
        tolerance = evaluator.tolerance()
        differing_states = tuple(
            name
            for name, state in states_after_whole.items()
            if not same(state, states_after_parts[name], tolerance=tolerance)
        )
        of_losses = abs(loss - expected_loss) / (abs(expected_loss) or 1.0)
        of_gradients = _nan_to_inf(evaluator.gradient_norm() / norm)
        if self.has_passed and self._losses_are_equal(expected_loss, loss):
            of_gradients = 0.0
        return _SplitDifference(of_gradients, of_losses, facts, differing_states)

    def _difference_of_losses(
        self, parts: Parts, weighting: Weighting, seed_offset: int
    ) -> _SplitDifference:
        """Compare only losses, which reveals coupled samples in nearly all cases as well."""
        self._start_whole()
        whole = without_graph(lambda: self._losses(self.whole, SAMPLES, needs_graph=False))
        if self.evaluator.is_two_pass():
            # A `TwoPass` computes its loss from all samples at once, regardless of the parts.
            return _SplitDifference(0.0, 0.0, whole.facts)
        expected = whole.total()
        self.evaluator.restore_start(self.seed + seed_offset)
        loss = without_graph(lambda: self._losses(parts, weighting, needs_graph=False)).total()
        if not math.isfinite(expected):
            return _SplitDifference(math.nan, 0.0, whole.facts)
        difference = _nan_to_inf(abs(loss - expected) / (abs(expected) or 1.0))
        return _SplitDifference(difference, 0.0, whole.facts)

    # --- passes

    def _start_whole(self) -> None:
        """Restore the start for a pass over the whole set, whose draws are recorded."""
        self.evaluator.restore_start(self.seed)
        if self.draws is not None:
            self.draws.start(sum(num_samples for _, num_samples in self.whole))

    def _accumulate_whole(self) -> tuple[float, _LossFacts]:
        """Add the gradient of the whole set to ``.grad``.

        Returns:
            The loss, and what the pass has shown about the loss function.
        """
        losses = self._losses(self.whole, SAMPLES)
        self._backward(losses.values)
        return losses.total(), losses.facts

    def _accumulate(self, parts: Parts, weighting: Weighting) -> float:
        """Add the gradient of the parts' weighted loss to ``.grad``, and return this loss."""
        evaluator = self.evaluator
        if isinstance(evaluator.loss_fn, TwoPass) and parts is not self.whole:
            run = TwoPassRun(
                call=evaluator.call,
                backward=lambda loss, inputs: loss.backward(inputs=inputs),  # type: ignore[no-untyped-call]
                new_keeper=lambda: BufferKeeper(dict(evaluator.models)),
                devices=evaluator.devices(),
                inputs=evaluator.trainable_parameters,
            )
            ((samples, _),) = self.whole
            return float(run.accumulate(evaluator.loss_fn, samples, parts).total().detach())
        losses = self._losses(parts, weighting)
        self._backward(losses.values)
        return losses.total()

    def _backward(self, losses: Sequence[torch.Tensor]) -> None:
        """Run backward from each loss, with the numbers of its forward pass."""
        inputs = self.evaluator.trainable_parameters()
        for loss in losses:
            # The loss of a part without items has no gradient.
            if loss.requires_grad:
                with contextlib.nullcontext() if self.draws is None else self.draws.backward():
                    loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]

    def _losses(self, parts: Parts, weighting: Weighting, *, needs_graph: bool = True) -> _Losses:
        """Return the loss of each part, weighted by its declared items or by `weighting`."""
        terms_of_parts: list[Terms] = []
        changes_batch = False
        first = 0
        for part, num_samples in parts:
            context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if self.draws is not None:
                context = self.draws.call(first, num_samples)
            with context:
                terms, changes_part = self.evaluator.terms(
                    part, num_samples, needs_graph=needs_graph
                )
            terms_of_parts.append(terms)
            changes_batch |= changes_part
            first += num_samples
        losses = []
        weights_of_parts = _weights_of_terms(terms_of_parts, parts, weighting)
        for terms, weights in zip(terms_of_parts, weights_of_parts, strict=True):
            # A term with weight 0 is left out, since its mean may be NaN.
            weighted = [
                mean * weight for mean, weight in zip(terms.means, weights, strict=True) if weight
            ]
            losses.append(sum(weighted, torch.zeros_like(terms.means[0])))
        declared = terms_of_parts[0].declared or self.evaluator.is_two_pass()
        return _Losses(losses, _LossFacts(declared, changes_batch))


def _first_differing_state(differences: Sequence[_SplitDifference | None]) -> str:
    """Return the first state that the parts leave different from the whole, or an empty string."""
    for difference in differences:
        if difference is not None and difference.differing_states:
            return difference.differing_states[0]
    return ""


def _weights_of_terms(
    terms_of_parts: Sequence[Terms], parts: Parts, weighting: Weighting
) -> list[list[float]]:
    """Return the weights of the loss terms for each part.

    If the loss declares items, the weight of a term is the part's share of the term's items.
    Otherwise, there is only one term, and `weighting` determines its weight.
    """
    if not terms_of_parts[0].declared:
        return [[weight] for weight in shares(weighting, parts) or (0.0,) * len(parts)]
    counts = [terms.read()[1] for terms in terms_of_parts]
    totals = [sum(column) for column in zip(*counts, strict=True)]
    return [
        [count / (total or 1.0) for count, total in zip(row, totals, strict=True)] for row in counts
    ]


def _kind_of_draws(draws: Draws | None) -> Draw:
    """Return the kind of random numbers that the loss has drawn."""
    if draws is None or not draws.drew:
        return "none"
    return "shared" if draws.shared else "own"


def _nan_to_inf(difference: float) -> float:
    # The gradient of the whole set is finite, so a NaN comes from the parts. It must count as a
    # difference, while NaN stands for a comparison that was not possible.
    return difference if math.isfinite(difference) else math.inf
