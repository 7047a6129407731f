"""Run trial splits to find out whether splitting keeps the gradient, and with which weights.

A trial splits 4 samples into 3 + 1 and compares the gradient of all 4 with the weighted sum of the
gradients of the two parts. If the loss function does not declare what its mean is taken over, all
candidates in the batch are tried. If none of them reproduces the gradient, the loss couples the
samples (in-batch negatives, a pairwise loss).

Models are in training mode, except for layers such as BatchNorm, which `SplitSafety` handles. The
parts receive the same random numbers for their samples as the whole batch. If that is impossible, a
loss with declared items is compared in evaluation mode, and any other loss is not compared.

`SplitCheck` says what is checked. ``subsets`` chooses the samples, ``comparer`` compares them, and
``searches`` looks for what no comparison shows. ``split_trials`` decides when a check is due and
where it runs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.guard.splitting.trial.comparer import NUM_SEEDS, Comparer, cut
from holdfast.guard.splitting.trial.evaluation import LossEvaluator, trial_mode
from holdfast.guard.splitting.trial.selection import find_selection
from holdfast.guard.splitting.trial.side_effects import find_changed_buffer, search_side_effects
from holdfast.guard.splitting.trial.split_result import SplitCheckResult, combine
from holdfast.guard.splitting.trial.subsets import (
    TRIAL_SAMPLES,
    consecutive_subsets,
    first_samples,
    subsets_with_empty_sample,
    with_one_label,
)
from holdfast.guard.splitting.weighting import Weighting, disagreement, find_weightings
from holdfast.guard.state.trees import same
from holdfast.loader.splitting import batch_size

# Weightings that differ by less than this need not be distinguished: the error is smaller than that
# of any coupled loss.
MIN_DISAGREEMENT = 0.01
# The maximum number of sets of four samples to compare.
_MAX_SUBSETS = 4
# The maximum number of sets of four samples to search for one that distinguishes weightings.
# Cutting and counting one set takes 0.1 ms.
_MAX_SUBSETS_TO_SEARCH = 64
# The share of a micro-batch's samples that are in the first part. The micro-batch is compared with
# its parts twice, once for each of these shares.
_HALF = 0.5
_THREE_QUARTERS = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCheck:
    """Checks whether splitting keeps the gradient of one loss function."""

    # Calls the loss function.
    evaluator: LossEvaluator
    # The weightings that held in earlier batches.
    earlier_weightings: Sequence[Weighting] = ()
    # Whether splitting kept the gradients of earlier batches.
    has_passed: bool = False

    def run(self, batch: Any, size: int, empty: int | None = None) -> SplitCheckResult:
        """Run the check on several sets of four samples from a batch.

        The sets are: the first samples, samples that are spread over the batch, and sets that
        distinguish candidates for the weighting.

        Args:
            batch: The batch.
            size: The number of samples in the batch.
            empty: The position of a sample for which the loss function declares no items. None if
                there is no such sample.

        Returns:
            The combined result of all comparisons.
        """
        split = self.evaluator.split
        self.evaluator.states.capture()
        subsets = consecutive_subsets(batch, size, split)
        changed_buffer = find_changed_buffer(self.evaluator, subsets[0])
        side_effects: tuple[str, ...] | None = None
        if self.evaluator.in_a_copy:
            side_effects = search_side_effects(self.evaluator, subsets[0])
        weightings = self._weightings(batch, size)
        with trial_mode(self.evaluator) as evaluator:
            comparer = Comparer(
                evaluator=evaluator, weightings=weightings, has_passed=self.has_passed
            )
            results = _compare_subsets(comparer, subsets)
            if not callable(split):
                for subset in subsets_with_empty_sample(batch, size, split, weightings, empty):
                    results.append(comparer.compare_if_it_fits(subset, _next_seed(results)))
                results += _compare_one_label(comparer, subsets[0], batch, _next_seed(results))
            selects = find_selection(evaluator, subsets[0], cut(subsets[0], split)[0][0])
        result = combine(results)
        return replace(
            result,
            changed_buffer=changed_buffer or result.changed_buffer,
            side_effects=side_effects,
            selects=selects,
        )

    def compare_halves(self, micro_batch: Any, size: int) -> SplitCheckResult:
        """Compare the gradient of a micro-batch with that of its two halves.

        A loss may start to couple or to select samples long after the first steps. A whole
        micro-batch reveals this more often than four samples. Comparing halves alone is not enough:
        the mean of the two largest of eight losses is the same if each half contains one of them.
        Therefore, the micro-batch is also split into three quarters and one quarter.

        Args:
            micro_batch: A micro-batch of a size that is known to fit in memory.
            size: The number of samples in the micro-batch.
        """
        self.evaluator.states.capture()
        weightings = self._weightings(micro_batch, size)
        shares = [_HALF]
        if size >= TRIAL_SAMPLES:
            shares.append(_THREE_QUARTERS)
        results: list[SplitCheckResult] = []
        with trial_mode(self.evaluator) as evaluator:
            for share in shares:
                comparer = Comparer(
                    evaluator=evaluator,
                    weightings=weightings,
                    has_passed=self.has_passed,
                    first_share=share,
                )
                result = comparer.compare_if_it_fits(micro_batch, _next_seed(results))
                results.append(replace(result, why=result.why or _describe_halves(result, size)))
                if result.outcome == "coupled":
                    break
            first_half = cut(micro_batch, evaluator.split, _HALF)[0][0]
            selects = find_selection(evaluator, micro_batch, first_half)
        return replace(combine(results), selects=selects)

    def detect_side_effects(
        self, batch: Any, size: int | None, *, include_logs: bool = False
    ) -> SplitCheckResult:
        """Find the side effects of a forward pass, without comparing gradients.

        Args:
            batch: The batch.
            size: The number of samples in the batch, of which four are used. With None, the whole
                batch is used.
            include_logs: Whether to include changes that do not affect the next loss, such as
                changes of a log, or of a counter that may have an effect later.
        """
        self.evaluator.states.capture()
        samples = batch
        if size is not None:
            samples = first_samples(batch, size, self.evaluator.split)
        side_effects = search_side_effects(self.evaluator, samples, include_logs=include_logs)
        return SplitCheckResult(outcome="trusted", side_effects=side_effects)

    def _weightings(self, batch: Any, size: int) -> list[Weighting]:
        """Return the candidates for the weighting in a batch, without duplicates."""
        return list(dict.fromkeys([*find_weightings(batch, size), *self.earlier_weightings]))


def _next_seed(results: Sequence[SplitCheckResult]) -> int:
    """Return the seed for the comparison after these, which then draws different numbers."""
    return NUM_SEEDS * len(results)


def _compare_subsets(comparer: Comparer, subsets: Sequence[Any]) -> list[SplitCheckResult]:
    """Compare the first and last set of samples, and then sets that distinguish weightings.

    As long as several weightings have held for all sets so far, the next set to compare is the one
    in which these weightings differ most.

    Args:
        comparer: Compares a set with its parts.
        subsets: The sets of samples.
    """
    # The first and the last set, or only one if there is only one.
    next_subsets = [*subsets[:1], *subsets[1:][-1:]]
    others = list(subsets[1:-1][:_MAX_SUBSETS_TO_SEARCH])
    results: list[SplitCheckResult] = []
    while next_subsets:
        result = comparer.compare_if_it_fits(next_subsets.pop(0), _next_seed(results))
        results.append(result)
        is_conclusive = result.declared or result.outcome != "exact"
        if next_subsets or is_conclusive or len(results) >= _MAX_SUBSETS:
            continue
        position = _most_distinguishing(others, comparer, results)
        if position is not None:
            next_subsets.append(others.pop(position))
    return results


def _most_distinguishing(
    subsets: Sequence[Any], comparer: Comparer, results: Sequence[SplitCheckResult]
) -> int | None:
    """Return the position of the set in which the remaining weightings differ most.

    Args:
        subsets: The sets of samples that have not been compared.
        comparer: Knows the candidates for the weighting.
        results: The comparisons so far. Weightings that have failed in one of them are left out.

    Returns:
        The position, or None if no set distinguishes the remaining weightings.
    """
    failed = {weighting for result in results for weighting in result.failed}
    remaining = [weighting for weighting in comparer.weightings if weighting not in failed]
    if len(remaining) < 2 or not subsets:
        return None
    split = comparer.evaluator.split
    differences = [disagreement(remaining, cut(subset, split)) for subset in subsets]
    largest = max(differences)
    if largest <= MIN_DISAGREEMENT:
        return None
    return differences.index(largest)


def _compare_one_label(
    comparer: Comparer, subset: Any, batch: Any, seed: int
) -> list[SplitCheckResult]:
    """Compare samples as if all of them had the label that is rarest in the batch.

    A loss that compares labels couples samples with the same label, and four samples rarely share a
    label. Without this check, the coupling might not be noticed.

    Args:
        comparer: Compares a set with its parts.
        subset: The samples.
        batch: The batch from which the samples are.
        seed: The seed for the random numbers.

    Returns:
        The result, or an empty list if the comparison shows nothing.
    """
    evaluator = comparer.evaluator
    result = None
    evaluator.restore_start(seed)
    states = evaluator.states.now()
    # This may fail, because the integers may be lengths or row numbers rather than labels.
    with contextlib.suppress(Exception):
        relabeled = with_one_label(subset, batch, batch_size(batch, evaluator.split))
        if relabeled is not None:
            result = comparer.compare(relabeled, seed)
    # The integers may be row numbers of a state that the loss function writes to.
    are_rows = not same(states, evaluator.states.now())
    evaluator.clear_gradients()
    if are_rows or result is None or result.why:
        return []
    why = ""
    if result.outcome == "coupled":
        why = (
            "the gradient over 4 samples of one label differs by"
            f" {result.difference:.1%} from the gradient over 3 + 1 of them"
        )
    # A state that differs may differ only because of the label.
    return [replace(result, why=why, changed_buffer="")]


def _describe_halves(result: SplitCheckResult, size: int) -> str:
    """Return a message about how a micro-batch differs from its parts, or an empty string."""
    if result.outcome != "coupled":
        return ""
    difference = "is finite, but the gradient over its parts is not"
    if math.isfinite(result.difference):
        difference = f"differs by {result.difference:.2%} from the gradient over its two parts"
    return f"the gradient over a micro-batch of {size} samples {difference}"
