"""`ItemWeights`: weight the gradients of each rank by its number of items.

To compute the mean over the items of all ranks, each rank's loss must be weighted by the rank's
share of the items. DistributedDataParallel and ``fully_shard`` instead give all ranks the same
weight. Each rank therefore multiplies its loss by its number of items, relative to a reference
number that is the same on all ranks. Once all numbers of items are known, all ranks multiply their
gradients by one correction factor.

The reference hardly ever changes. In particular, it does not depend on the last step, whose rows
the host may not have read yet; see ``decision``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from holdfast.guard.ranks.row import DeviceRows, Rows
from holdfast.numerics.gradients import local, multiply
from holdfast.numerics.loss import check_count


@final
class ItemWeights:
    """The weights of the gradients in the current attempt.

    Args:
        world_size: The number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        # The number by which each rank divides its own number of items. It is the same on all
        # ranks. None until the first step, or until `restore` is called.
        self.reference: float | None = None
        # The value of `reference` before the current attempt.
        self.reference_before: float | None = None
        # Whether the numbers of items in the current attempt must be whole numbers.
        self._counted = False

    def begin_attempt(self) -> None:
        """Start an attempt, so that a change of the reference in it can be undone."""
        self.reference_before = self.reference

    def discard_attempt(self) -> None:
        """Restore the reference from before the current attempt, which has failed on some rank."""
        self.reference = self.reference_before

    def restore(self, reference: float | None) -> None:
        """Set the reference to an earlier value, which must be the same on all ranks.

        Args:
            reference: The value from a checkpoint or from before an attempt. None if there was no
                reference.
        """
        self.reference = reference

    def weight(self, items: Any, *, counted: bool, wait_for_rows: Callable[[], Rows]) -> Any:
        """Return the weight of this rank's gradients in the current attempt.

        Args:
            items: How many items this rank's loss is averaged over: a number, or a tensor of shape
                ``()``.
            counted: Whether the number of items must be a whole number.
            wait_for_rows: Function that returns the rows of all ranks in this attempt. It is called
                only if the reference may have to change.

        Returns:
            A number or a tensor of shape ``()``, like `items`.
        """
        self._counted = counted
        return items / self._reference_for(items, wait_for_rows)

    def _reference_for(self, items: Any, wait_for_rows: Callable[[], Rows]) -> float:
        """Return the reference, by which each rank divides its own number of items.

        The reference is the mean number of items over the ranks in the first step. It changes if
        all ranks know on the host that they have another, equal number: the weight is then exactly
        1, so the gradients are bit-identical to those of an unguarded loop. A rank waits for the
        rows of the other ranks only if its number is known on the host and differs from the
        reference. A rank that does not wait keeps the reference, so the others must keep it too.
        """
        reference = self.reference
        if reference is None or (isinstance(items, (int, float)) and items != reference):
            rows = wait_for_rows()
            if rows.failed:
                # This attempt will be discarded, so any value is suitable.
                return float(items)
            if reference is None or rows.have_equal_known_items:
                reference = rows.items / self._world_size
                self.reference = reference
        return reference

    def correct_gradients(self, rows: Rows, parameters: Sequence[torch.Tensor]) -> None:
        """Multiply the gradients by one factor that corrects the ranks' weights.

        The weights were relative to the reference, which may differ from the mean number of items.

        Args:
            rows: The rows of all ranks.
            parameters: The parameters that have gradients.

        Raises:
            BatchError: H203 if the number of items is not valid on one of the ranks.
        """
        for row in rows.by_rank:
            # A rank may have 0 items only if it repeats samples that another rank counts.
            items = row.items if row.repeats else row.items or math.nan
            check_count(items, counted=self._counted)
        factor = self._correction(rows.items)
        if factor != 1.0:
            torch._foreach_mul_(_local_gradients(parameters), factor)

    def correct_gradients_on_device(
        self, rows: DeviceRows, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Do the same as `correct_gradients`, without reading the rows.

        Args:
            rows: The rows of all ranks.
            parameters: The parameters that have gradients.

        Returns:
            The number of items on all ranks, shape ``()``. NaN if it is not valid on one of the
            ranks, or if the ranks are not at the same step.
        """
        items = rows.items()
        multiply(_local_gradients(parameters), self._correction(items))
        return torch.where(rows.are_valid(counted=self._counted), items, math.nan)

    def _correction(self, items: Any) -> Any:
        """Return the factor that corrects the weights, given the number of items on all ranks."""
        assert self.reference is not None
        return self._world_size * self.reference / items


def _local_gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of parameters, as far as this rank holds them."""
    return [local(p.grad) for p in parameters if p.grad is not None]
