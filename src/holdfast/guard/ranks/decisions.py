"""Decisions that all ranks derive from the rows of a step: when to stop, and when to save."""

from __future__ import annotations

import signal
import time
from typing import final

from holdfast.guard.cursor import Cursor
from holdfast.guard.ranks.messages import Messages
from holdfast.guard.ranks.row import EPOCH_END, STOP_BY_SCRIPT, STOP_FROM_OUTSIDE, Rows
from holdfast.guard.saving.saves import Saving
from holdfast.guard.stop import StopRequest

# How long a rank that ends with an error waits for the checkpoint writers of all ranks, in seconds.
_WRITER_SECONDS = 2.0


@final
class GroupStopRequest(StopRequest):
    """The common stop request of all ranks.

    A request that is made on one rank reaches the other ranks in the next step.

    Args:
        own: The stop request of this rank.
        messages: The connection to the other ranks.
    """

    def __init__(self, own: StopRequest, messages: Messages) -> None:
        super().__init__()
        self._own = own
        self._messages = messages

    def as_number(self) -> float:
        """Return this rank's request as a number; see `Row.stop`."""
        if self._own.signal is not None:
            return 1.0 + self._own.signal
        if self._own.from_outside:
            return STOP_FROM_OUTSIDE
        return 0.0 if self._own.reason is None else STOP_BY_SCRIPT

    def receive(self, rows: Rows) -> None:
        """Adopt the stop requests in the rows of all ranks.

        If ranks received different signals, all ranks follow the one with the highest number. The
        reason must be the same on all ranks, since a script may use it to decide what to do next.
        """
        rank, stop = rows.stop
        # For a signal, the number is 1 plus the signal's number; see `Row.stop`.
        if stop > STOP_FROM_OUTSIDE:
            self.signal = signal.Signals(int(stop) - 1)
            self.reason = self.signal.name
            self.rank = rank
        elif stop == STOP_FROM_OUTSIDE and not self.by_signal:
            self.request_from_outside()
            self.rank = rank
        elif stop and self.reason is None:
            # The row has no room for the reason that was passed to `request_stop`.
            self.reason = self._messages.exchange("the reason to stop", self._own.reason)[rank]
            self.rank = rank

    def reset(self, *, raised: bool = False) -> None:
        """Clear a stop request that has ended a loop, including this rank's own request."""
        if self.honored:
            self._own.honor()
        self._own.reset(raised=raised)
        super().reset(raised=raised)

    def __enter__(self) -> None:
        """Do nothing: all ranks stop together, so a signal must not interrupt a single rank."""


@final
class GroupSaves:
    """Makes all ranks save at the same steps. The first rank decides when.

    Args:
        own: The object that saves this rank's checkpoints.
        messages: The connection to the other ranks.
        cursor: The position of this rank in its loader. None if there is no loader.
    """

    def __init__(self, own: Saving, messages: Messages, cursor: Cursor | None) -> None:
        self._own = own
        self._messages = messages
        self._cursor = cursor
        # The global steps at which a save is due, according to the last row that was received.
        self._due_at: list[int] = []
        # The global step at which `take_due` last returned True, or -1.
        self._taken_at = -1
        self._refused = False

    def fields_of_row(self, kind: float) -> dict[str, float]:
        """Return the row fields that say when to save. Only the first rank calls this.

        Args:
            kind: The kind of the row that is about to be sent, such as `STEP`.
        """
        if kind == EPOCH_END:
            is_due = self._own.is_due()
            is_due_next = self._own.is_due(after_steps=1, saved_after=0 if is_due else None)
        else:
            is_due = self._is_due_after(steps=1)
            # The row of the next step may be read too late for a save after that step.
            is_due_next = self._is_due_after(steps=2, saved_after=1 if is_due else None)
        return {
            "save": is_due,
            "save_next": is_due_next,
            "refused": self._own.has_refusal,
        }

    def _is_due_after(self, *, steps: int, saved_after: int | None = None) -> bool:
        """Return whether a save is due this many steps after the last one.

        Args:
            steps: The number of steps.
            saved_after: After how many steps the state will have been saved before. None if it will
                not be saved before.
        """
        if self._cursor is not None and self._cursor.seems_to_end_after(batches=steps - 1):
            # A save can wait for the end of the epoch.
            return False
        return self._own.is_due(after_steps=steps, saved_after=saved_after)

    def receive(self, rows: Rows, *, is_counted: bool) -> None:
        """Take over when to save from the first rank's row.

        Args:
            rows: The rows of all ranks.
            is_counted: Whether the global step includes the step to which the rows belong.
        """
        first = rows.by_rank[0]
        self._refused = bool(first.refused)
        # A row of a step is sent before the step is counted. The row at the end of an epoch follows
        # the last step.
        step = self._own.global_step + int(not is_counted)
        self._due_at = []
        if first.save:
            self._due_at.append(step)
        if first.save_next:
            self._due_at.append(step + 1)

    def is_due(self) -> bool:
        """Return whether all ranks must save at this step boundary.

        The result is False if the step after which a save was due has been skipped, or if
        `take_due` has returned True at that step or a later one.
        """
        global_step = self._own.global_step
        if self._taken_at > global_step:
            # The run has returned to an earlier step since then.
            self._taken_at = -1
        return any(self._taken_at < step <= global_step for step in self._due_at)

    def take_due(self) -> bool:
        """Return whether all ranks must save now, and count the save as done."""
        if not self.is_due():
            return False
        self._taken_at = self._own.global_step
        return True

    def let_finish(self) -> None:
        """Wait briefly for a running save, which stops once the other ranks learn of an error."""
        until = time.monotonic() + _WRITER_SECONDS
        while self._own.is_busy and time.monotonic() < until:
            time.sleep(0.02)

    def take_refusal(self) -> str | None:
        """Return, on all ranks, why a save has been refused since the last call, or None."""
        if not self._refused:
            return None
        self._refused = False
        return str(self._messages.exchange("refusal", self._own.take_refusal())[0])
