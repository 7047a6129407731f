"""`RowExchange`: exchange rows in each attempt, and weight gradients by the number of items.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from holdfast.guard.cursor import Cursor
from holdfast.guard.ranks.decisions import GroupSaves, GroupStopRequest
from holdfast.guard.ranks.distributed_model import DistributedModel
from holdfast.guard.ranks.messages import Messages
from holdfast.guard.ranks.row import STEP, DeviceRows, PendingRows, Position, Row, Rows
from holdfast.numerics.gradients import local, multiply
from holdfast.numerics.loss import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnreadRows:
    """The exchange of an attempt that has ended, before the host has read it."""

    pending: PendingRows
    # The value of `RowExchange.reference` before the attempt.
    reference_before: float | None


@final
class RowExchange:
    """The exchange of rows in the current attempt. Used by `ProcessGroupRanks`.

    Args:
        model: The model, whose process group is used for the exchange.
        messages: The connection to the other ranks.
        world_size: The number of ranks.
        stop: The stop request that all ranks follow.
        saves: The object that decides when all ranks save.
        cursor: The position of this rank in its loader. None if there is no loader.
    """

    def __init__(
        self,
        *,
        model: DistributedModel,
        messages: Messages,
        world_size: int,
        stop: GroupStopRequest,
        saves: GroupSaves,
        cursor: Cursor | None,
    ) -> None:
        self._model = model
        self._messages = messages
        self._world_size = world_size
        self._stop = stop
        self.saves = saves
        self._cursor = cursor
        # The exchange that this rank has started in this attempt, or None.
        self._pending: PendingRows | None = None
        # The rows of all ranks. None until the gradients of this attempt are reduced.
        self._rows: Rows | None = None
        # The number by which each rank divides its own number of items. It is the same on all
        # ranks.
        self.reference: float | None = None
        # The value of `reference` before this attempt.
        self._reference_before: float | None = None
        # Whether the numbers of items in this attempt must be whole numbers.
        self._counted = False
        # The exchanges of ended attempts that the host has not read yet: at most that of the last
        # step and that of the current one.
        self._unread: list[_UnreadRows] = []

    def resume(self, reference: float | None) -> None:
        """Set the reference to that of a checkpoint, or to None if the checkpoint has none."""
        self.reference = reference

    # --- an attempt

    def begin_attempt(self) -> None:
        """Clear the rows of the last attempt."""
        self._pending = None
        self._rows = None
        self._reference_before = self.reference

    @property
    def is_sending(self) -> bool:
        """Return whether this rank has started to send its row in this attempt."""
        return self._pending is not None

    @property
    def is_received(self) -> bool:
        """Return whether this rank has reduced its gradients and received the rows of all ranks."""
        return self._rows is not None

    @property
    def rows(self) -> Rows:
        """Return the rows of all ranks, as stored by `receive`."""
        assert self._rows is not None
        return self._rows

    def send(self, loss: Any, items: Any, **fields: Any) -> PendingRows:
        """Start sending the row of this rank.

        Args:
            loss: The loss of this rank.
            items: How many items this rank's loss is averaged over.
            **fields: Further fields of the row; see `Row`.
        """
        self._messages.check_here()
        row = self.row_of_this_rank(**fields)
        self._model.before_row()
        self._pending = PendingRows(row, loss, items, self._model.device, self._model.group)
        self._model.after_row()
        return self._pending

    def send_failure(self) -> None:
        """Start sending a row that reports a failed attempt on this rank."""
        self.send(math.nan, 1.0, failed=True)

    def wait(self) -> Rows:
        """Wait for the rows of all ranks, and return them."""
        assert self._pending is not None
        return self._pending.rows()

    def row_of_this_rank(self, **fields: Any) -> Row:
        """Return this rank's row, with its stop request and the first rank's save decision."""
        if self._messages.rank == 0:
            fields |= self.saves.fields_of_row(fields.get("kind", STEP))
        return Row(
            number=self._messages.steps,
            guard=self._messages.guard,
            stop=self._stop.as_number(),
            **self.position()._asdict(),
            **fields,
        )

    def position(self) -> Position:
        """Return the position of this rank in its data, which is constant without a loader."""
        cursor = self._cursor
        if cursor is None:
            return Position()
        return Position(cursor.epoch, cursor.batches, cursor.passed)

    # --- the weight of this rank

    def weight(self, loss: torch.Tensor, items: Any, *, counted: bool, **fields: Any) -> Any:
        """Send this rank's loss and number of items, and return the weight of its gradients.

        Args:
            loss: The loss of this rank, detached, shape ``()``.
            items: How many items this rank's loss is averaged over: a number, or a tensor of shape
                ``()``.
            counted: Whether the number of items must be a whole number.
            **fields: Further fields of the row; see `Row`.
        """
        repeats = self._cursor is not None and self._cursor.repeats()
        if repeats:
            # Another rank trains on the same samples and counts them.
            items = 0.0
        knows_items = isinstance(items, (int, float))
        self.send(loss, items, repeats=repeats, knows_items=knows_items, **fields)
        self._counted = counted
        return items / self._reference_for(items)

    def _reference_for(self, items: Any) -> float:
        """Return the reference, by which each rank divides its own number of items.

        The reference is the mean number of items over the ranks in the first step. It changes if
        all ranks know on the host that they have another, equal number: the weight is then exactly
        1, so the gradients are bit-identical to those of an unguarded loop. A rank waits for the
        rows of the other ranks only if its number is known on the host and differs from the
        reference. A rank that does not wait keeps the reference, so the others must keep it too.
        """
        reference = self.reference
        if reference is None or (isinstance(items, (int, float)) and items != reference):
            rows = self.wait()
            if rows.failed:
                # This attempt will be discarded, so any value is suitable.
                return float(items)
            if reference is None or rows.have_equal_known_items:
                reference = rows.items / self._world_size
                self.reference = reference
        return reference

    def receive(self) -> Rows:
        """Wait for the rows of all ranks after the gradients were reduced, and return them."""
        self._rows = self.wait()
        return self._rows

    def correct_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Multiply the gradients by one factor that corrects the ranks' weights.

        The weights were relative to the reference, which may differ from the mean number of items.

        Args:
            parameters: The parameters that have gradients.
        """
        rows = self.rows
        assert self.reference is not None
        for row in rows.by_rank:
            # A rank may have 0 items only if it repeats samples that another rank counts.
            items = row.items if row.repeats else row.items or math.nan
            check_count(items, counted=self._counted)
        factor = self._world_size * self.reference / rows.items
        if factor != 1.0:
            torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)

    def correct_gradients_unread(self, parameters: Sequence[torch.Tensor]) -> DeviceRows:
        """Multiply the gradients by the factor, without reading the rows of the other ranks.

        Args:
            parameters: The parameters that have gradients.

        Returns:
            The rows of all ranks, on the device.
        """
        assert self._pending is not None
        assert self.reference is not None
        rows = self._pending.on_device()
        factor = self._world_size * self.reference / rows.items()
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        multiply(gradients, factor)
        return rows

    @property
    def counted(self) -> bool:
        """Return whether the numbers of items in this attempt must be whole numbers."""
        return self._counted

    def receive_decisions(self, rows: Rows, *, is_counted: bool) -> None:
        """Apply the stop requests and save decisions in the rows of all ranks.

        Args:
            rows: The rows of all ranks.
            is_counted: Whether the global step includes the step to which the rows belong.
        """
        self._stop.receive(rows)
        self.saves.receive(rows, is_counted=is_counted)

    # --- the end of an attempt

    def leave_unread(self) -> None:
        """End an attempt whose rows are read after the next attempt, by `take_unread`."""
        assert self._pending is not None
        self._pending.start_reading()
        unread = _UnreadRows(pending=self._pending, reference_before=self._reference_before)
        self._unread.append(unread)

    @property
    def has_unread(self) -> bool:
        """Return whether the rows of an attempt that has ended have not been read yet."""
        return bool(self._unread)

    def take_unread(self, *, except_newest: bool) -> Rows | None:
        """Return the rows of the oldest attempt that `leave_unread` has ended, or None.

        Args:
            except_newest: Whether to leave out the newest attempt.

        Raises:
            RankError: H116 if the ranks are not at the same step with the same batch.
        """
        if len(self._unread) <= int(except_newest):
            return None
        return self._unread.pop(0).pending.rows()

    def discard_unread(self) -> None:
        """Discard the attempts that `leave_unread` has ended, of which the oldest was refused.

        Raises:
            RankError: H116 if the ranks were not at the same step with the same batch.
        """
        oldest = self._unread[0]
        self._unread = []
        self.reference = oldest.reference_before
        oldest.pending.rows()

    def discard(self) -> None:
        """Restore the reference from before this attempt."""
        self.reference = self._reference_before
