"""`Comparer`: compare sets of samples with their parts, in the strictest way that is possible.

If memory is short, fewer samples are compared, or only their losses. If random numbers cannot be
repeated for the parts, a loss with declared items is compared in evaluation mode, and any other
loss is not compared. If samples share random numbers, the comparison is repeated with others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from holdfast.guard.splitting.trial.comparison import Comparison, Quantity
from holdfast.guard.splitting.trial.draws import Draws, NotRepeatableError
from holdfast.guard.splitting.trial.evaluation import LossEvaluator, Parts, in_evaluation_mode
from holdfast.guard.splitting.trial.split_result import Draw, SplitCheckResult, combine
from holdfast.guard.splitting.weighting import Weighting
from holdfast.loader.splitting import Split, batch_size, micro_batches
from holdfast.memory.oom import clear_exception_frames, find_out_of_memory

# The number of comparisons, each with different random numbers, if samples share random numbers.
# Comparisons with seeds that are this far apart draw different numbers.
NUM_SEEDS = 3


def cut(subset: Any, split: Split, first_share: float | None = None) -> Parts:
    """Cut a set of samples into two parts.

    Args:
        subset: The samples, at least two.
        split: Which dimension of the batch's tensors is the batch dimension.
        first_share: The share of the samples in the first part, rounded up. None for all samples
            but one.
    """
    num_samples = batch_size(subset, split)
    first = num_samples - 1
    if first_share is not None:
        first = min(first, math.ceil(first_share * num_samples))
    return micro_batches(subset, num_samples, first, split)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparer:
    """Compares sets of samples with their two parts, for one loss function."""

    # Calls the loss function, inside its `trial_mode`.
    evaluator: LossEvaluator
    # The candidates for the weighting, unless items are declared.
    weightings: Sequence[Weighting]
    # Whether splitting kept the gradients of earlier batches.
    has_passed: bool
    # The share of the samples in the first part. None for all samples but one.
    first_share: float | None = None

    def compare_if_it_fits(self, subset: Any, seed: int) -> SplitCheckResult:
        """Compare the gradients of a set. If memory is short, use 2 samples, or only their losses.

        Args:
            subset: The samples.
            seed: The seed for the random numbers. The following `NUM_SEEDS` - 1 seeds may also be
                used.
        """
        split = self.evaluator.split
        pair = micro_batches(subset, batch_size(subset, split), 2, split)[0][0]
        smaller_attempts: list[tuple[Any, Quantity]] = [(pair, "gradients"), (pair, "losses")]
        samples = subset
        quantity: Quantity = "gradients"
        while True:
            try:
                return self.compare(samples, seed, quantity)
            except Exception as error:
                if find_out_of_memory(error) is None or not smaller_attempts:
                    raise
                failure = error
            finally:
                self.evaluator.clear_gradients()
            # The frames of the failed attempt can be dropped only outside the exception handler.
            clear_exception_frames(failure)
            samples, quantity = smaller_attempts.pop(0)

    def compare(self, subset: Any, seed: int, quantity: Quantity = "gradients") -> SplitCheckResult:
        """Compare a set of samples with its two parts, under each weighting.

        If the random numbers cannot be repeated, this falls back to evaluation mode.

        Args:
            subset: The samples.
            seed: The seed for the random numbers; see `compare_if_it_fits`.
            quantity: Whether to compare gradients or losses.
        """
        result = self._compare_in_this_mode(subset, seed, quantity)
        if result.draws != "unknown" or not result.declared:
            return result
        # The loss may draw random numbers only in training mode.
        with in_evaluation_mode(self.evaluator.models.values(), nn.Module.modules):
            without_dropout = self._compare_in_this_mode(subset, seed, quantity)
        without_dropout = _with_changed_buffer_of(result, without_dropout)
        if without_dropout.keeps_gradient():
            draws: Draw = "own" if self.evaluator.is_two_pass() else "unknown"
            return replace(without_dropout, outcome="random", draws=draws)
        return without_dropout

    def _compare_in_this_mode(self, subset: Any, seed: int, quantity: Quantity) -> SplitCheckResult:
        """Compare a set of samples with its two parts, in the current mode of the models."""
        if self.evaluator.is_two_pass():
            return self._compare_with(None, subset, seed, quantity)
        result = self._compare_with_same_draws(subset, seed, quantity)
        for next_seed in range(seed + 1, seed + NUM_SEEDS):
            # Shared random numbers may decide whether samples are mixed, so repeat the comparison
            # with other numbers.
            if result.outcome == "random" and result.draws == "shared":
                other_result = self._compare_with_same_draws(subset, next_seed, quantity)
                result = combine([result, other_result])
        return result

    def _compare_with_same_draws(
        self, subset: Any, seed: int, quantity: Quantity
    ) -> SplitCheckResult:
        """Compare a set of samples with two parts that get the same random numbers as the set.

        Numbers from Python and numpy cannot be assigned to samples. First, each part starts from
        the same seed. If that gives no result, the generators continue from part to part.
        """
        draws = self._new_draws(seed, in_order=False)
        try:
            result = self._compare_with(draws, subset, seed, quantity)
            if result.draws != "unknown" or not draws.outside_torch:
                return result
            draws = self._new_draws(seed, in_order=True)
            result_in_order = self._compare_with(draws, subset, seed, quantity)
            return _with_changed_buffer_of(result, result_in_order)
        except NotRepeatableError:
            # If the loss function draws numbers for one sample after another, the parts draw the
            # same numbers as the whole set without help.
            result = self._compare_with(None, subset, seed, quantity)
        if result.outcome == "exact":
            return replace(result, outcome="random", draws="own")
        return result

    def _new_draws(self, seed: int, *, in_order: bool) -> Draws:
        evaluator = self.evaluator
        return Draws(evaluator.devices(), evaluator.tolerance(), seed, in_order=in_order)

    def _compare_with(
        self, draws: Draws | None, subset: Any, seed: int, quantity: Quantity
    ) -> SplitCheckResult:
        """Compare a set of samples with its two parts, once.

        Args:
            draws: The object that repeats random numbers in the parts. None repeats no numbers.
            subset: The samples.
            seed: The seed for the random numbers.
            quantity: Whether to compare gradients or losses.
        """
        split = self.evaluator.split
        comparison = Comparison(
            evaluator=self.evaluator,
            whole=[(subset, batch_size(subset, split))],
            parts=cut(subset, split, self.first_share),
            quantity=quantity,
            seed=seed,
            draws=draws,
            has_passed=self.has_passed,
        )
        return comparison.run(self.weightings)


def _with_changed_buffer_of(first: SplitCheckResult, last: SplitCheckResult) -> SplitCheckResult:
    """Return the last of two results, with the changed state of either of them."""
    return replace(last, changed_buffer=first.changed_buffer or last.changed_buffer)
