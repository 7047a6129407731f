"""Choose the sets of samples with which a trial split is run.

The sets are: the first samples, samples that are spread over the batch, sets that distinguish
weightings, sets with a sample that has no items, and samples that all have the same label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.guard.splitting.weighting import Weighting, with_an_empty_one
from holdfast.loader.splitting import Split, micro_batches, select

# The number of samples in a trial.
TRIAL_SAMPLES = 4
# The maximum number of sets that end with a sample without items, and the maximum number of samples
# to search for one.
_MAX_EMPTY = 2
_MAX_SAMPLES_TO_SEARCH = 256


def first_samples(batch: Any, size: int, split: Split) -> Any:
    """Return the first `TRIAL_SAMPLES` samples of a batch, or all samples if there are fewer."""
    return micro_batches(batch, size, min(TRIAL_SAMPLES, size), split)[0][0]


def consecutive_subsets(batch: Any, size: int, split: Split) -> list[Any]:
    """Return sets of consecutive samples, the last of which is spread over the batch instead.

    Args:
        batch: The batch.
        size: The number of samples in the batch, at least two.
        split: Which dimension of the batch's tensors is the batch dimension. A batch that is split
            by a function cannot provide samples that are spread over it.
    """
    subsets = [
        subset
        for subset, num_samples in micro_batches(batch, size, min(TRIAL_SAMPLES, size), split)
        if num_samples > 1
    ]
    if not callable(split) and size > TRIAL_SAMPLES:
        # Samples that are far apart in the batch are more likely to differ.
        spread = select(batch, size, [0, 1, size // 2, size - 1], split)
        subsets = [*subsets[:1], *subsets[1:-1], spread]
    return subsets


def subsets_with_empty_sample(
    batch: Any, size: int, split: Split, weightings: Sequence[Weighting], empty: int | None
) -> list[Any]:
    """Return sets of samples whose last sample has no items.

    When such a set is cut, its second part is this sample, which has weight 0. A comparison shows
    whether the part still has a loss, which would be lost if the part were left out.

    Args:
        batch: The batch.
        size: The number of samples in the batch.
        split: Which dimension of the batch's tensors is the batch dimension.
        weightings: The candidates for the weighting. For each of them, one set ends with a sample
            whose weight is 0, if the batch contains one.
        empty: The position of a sample for which the loss function declares no items. If it is not
            None, the first set ends with this sample.
    """
    single_samples = micro_batches(batch, size, 1, split)[:_MAX_SAMPLES_TO_SEARCH]
    sets = [
        tuple(with_an_empty_one(weighting, single_samples, TRIAL_SAMPLES))
        for weighting in weightings
    ]
    if empty is not None:
        others = [position for position in range(size) if position != empty]
        sets.insert(0, (*others[: TRIAL_SAMPLES - 1], empty))
    # A set is empty if no sample has weight 0. Several weightings may give the same set.
    distinct_sets = list(dict.fromkeys(filter(None, sets)))
    return [select(batch, size, positions, split) for positions in distinct_sets[:_MAX_EMPTY]]


def with_one_label(subset: Any, batch: Any, size: int) -> Any | None:
    """Return samples in which each label is the one that is rarest in the batch.

    Args:
        subset: Some samples of the batch.
        batch: The whole batch.
        size: The number of samples in the batch.

    Returns:
        The samples, or None if the batch has no labels, that is, no integer for each sample.
    """
    if not any(_are_labels(leaf, size) for leaf in pytree.tree_leaves(batch)):
        return None

    def relabeled(leaf: Any, whole: Any) -> Any:
        if not _are_labels(whole, size):
            return leaf
        values, counts = torch.unique(whole, return_counts=True)
        return torch.full_like(leaf, values[counts.argmin()])

    return pytree.tree_map(relabeled, subset, batch)


def _are_labels(leaf: Any, size: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.shape == (size,) and not leaf.is_floating_point()
