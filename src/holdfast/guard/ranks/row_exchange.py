"""`RowExchange`: exchange rows with the other ranks, once in each attempt at a step.

A late attempt ends before the host has read its rows; see ``decision``. The exchange then keeps
these rows until the ranks have either accepted the step or refused it together.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from holdfast.guard.cursor import Cursor
from holdfast.guard.ranks.decisions import GroupSaves, GroupStopRequest
from holdfast.guard.ranks.distributed_model import DistributedModel
from holdfast.guard.ranks.item_weights import ItemWeights
from holdfast.guard.ranks.messages import Messages
from holdfast.guard.ranks.row import STEP, DeviceRows, PendingRows, Position, Row, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _LateAttempt:
    """A late attempt that has ended, and whose rows the host has not read."""

    pending: PendingRows
    # The value of `ItemWeights.reference` before the attempt.
    reference_before: float | None


@final
class RowExchange:
    """The exchange of rows in the current attempt. Used by `ProcessGroupRanks`.

    Args:
        model: The model, whose process group is used for the exchange.
        messages: The connection to the other ranks.
        weights: The weights of the gradients.
        stop: The stop request that all ranks follow.
        saves: The object that decides when all ranks save.
        cursor: The position of this rank in its loader. None if there is no loader.
    """

    def __init__(
        self,
        *,
        model: DistributedModel,
        messages: Messages,
        weights: ItemWeights,
        stop: GroupStopRequest,
        saves: GroupSaves,
        cursor: Cursor | None,
    ) -> None:
        self._model = model
        self._messages = messages
        self._weights = weights
        self._stop = stop
        self.saves = saves
        self._cursor = cursor
        # The names of the optimizers to step in this attempt.
        self._optimizers: list[str] = []
        # The exchange that this rank has started in this attempt, or None.
        self._pending: PendingRows | None = None
        # The rows of all ranks. None until the gradients of this attempt are reduced.
        self._rows: Rows | None = None
        # The late attempts that have ended, oldest first: at most one at the last step, and one at
        # the current step.
        self._late_attempts: list[_LateAttempt] = []

    # --- an attempt

    def begin_attempt(self, optimizers: Sequence[str]) -> None:
        """Clear the rows of the last attempt.

        Args:
            optimizers: The names of the optimizers to step in this attempt.
        """
        self._optimizers = list(optimizers)
        self._pending = None
        self._rows = None
        self._weights.begin_attempt()

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

    def send_and_weight(
        self, loss: torch.Tensor, items: Any, *, counted: bool, **fields: Any
    ) -> Any:
        """Start sending this rank's row, and return the weight of this rank's gradients.

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
        self.send(loss, items, repeats=repeats, **fields)
        return self._weights.weight(items, counted=counted, wait_for_rows=self.wait)

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
        # The mean loss over all ranks is then that of the other ranks.
        self.send(0.0, 0.0, failed=True)

    def loss_of_all(self) -> torch.Tensor:
        """Return the mean loss over the items of all ranks in this attempt, shape ``()``, unread.

        Ranks that have failed before they had a loss are left out.
        """
        assert self._pending is not None
        return self._pending.on_device().loss()

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
            # The names do not fit into a number, but a checksum shows whether they are equal. Their
            # order matters too: it is the order in which the norms of the gradients are summed.
            optimizers=zlib.crc32(repr(self._optimizers).encode()),
            **self.position()._asdict(),
            **fields,
        )

    def position(self) -> Position:
        """Return the position of this rank in its data, which is constant without a loader."""
        cursor = self._cursor
        if cursor is None:
            return Position()
        return Position(cursor.epoch, cursor.batches, cursor.passed)

    def receive(self) -> Rows:
        """Wait for the rows of all ranks after the gradients were reduced, and return them."""
        self._rows = self.wait()
        return self._rows

    def on_device(self) -> DeviceRows:
        """Return the rows of all ranks on the device, after the gradients were reduced."""
        assert self._pending is not None
        return self._pending.on_device()

    def apply_stops_and_saves(self, rows: Rows, *, is_counted: bool) -> None:
        """Apply the stop requests and save decisions in the rows of all ranks.

        All ranks must call this at the same point, because they may exchange the reason for a stop.

        Args:
            rows: The rows of all ranks.
            is_counted: Whether the global step includes the step to which the rows belong.
        """
        self._stop.receive(rows)
        self.saves.receive(rows, is_counted=is_counted)

    # --- late attempts

    def end_late_attempt(self) -> None:
        """End an attempt before its rows are read, and start copying them to the host."""
        assert self._pending is not None
        self._pending.start_reading()
        attempt = _LateAttempt(
            pending=self._pending, reference_before=self._weights.reference_before
        )
        self._late_attempts.append(attempt)

    @property
    def has_late_attempt(self) -> bool:
        """Return whether the rows of a late attempt that has ended have not been read yet."""
        return bool(self._late_attempts)

    def take_late_rows(self, *, is_next_attempted: bool) -> Rows | None:
        """Return the rows of the last step's late attempt, and no longer keep them.

        Args:
            is_next_attempted: Whether a late attempt at the current step has ended too. Its rows
                are kept.

        Returns:
            The rows, or None if the last step was not late or its rows have been taken already.

        Raises:
            RankError: H116 if the ranks are not at the same step with the same batch.
        """
        if len(self._late_attempts) <= int(is_next_attempted):
            return None
        return self._late_attempts.pop(0).pending.rows()

    def discard_late_attempts(self) -> None:
        """Discard the late attempt at the last step, which was refused, and any one after it.

        The reference becomes the one from before the refused step.

        Raises:
            RankError: H116 if the ranks were not at the same step with the same batch.
        """
        refused = self._late_attempts[0]
        self._late_attempts = []
        self._weights.restore(refused.reference_before)
        refused.pending.rows()
