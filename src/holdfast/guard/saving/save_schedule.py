"""`SaveSchedule`: when the checkpoints of a run are due, by steps and by time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from holdfast.checkpoint.interval import IntervalChooser, SaveCost
from holdfast.core.clock import Clock
from holdfast.core.policy.policy import Policy
from holdfast.guard.record import RunRecord
from holdfast.guard.saving.save_writer import Save

# The host buffers are prepared this many seconds before the first save is due.
_AHEAD_SECONDS = 3.0


class SaveSchedule:
    """Decides when the saves of one run are due.

    The first save is due immediately. Later saves are due after `save_interval_steps`, or when
    enough time has passed since the last attempt, according to `IntervalChooser`.

    Args:
        interval: The policy's `save_interval_steps`: a number of steps, or "auto". None if this
            process saves nothing.
        chooser: The object that chooses the time between saves.
        record: The record that counts the optimizer steps.
        clock: The source of time.
        trains_on_cpu: Whether training needs the CPU cores, so that the CPU time of a save counts
            as part of its cost.
    """

    def __init__(
        self,
        interval: int | Literal["auto"] | None,
        chooser: IntervalChooser,
        record: RunRecord,
        clock: Clock,
        *,
        trains_on_cpu: bool,
    ) -> None:
        self._interval = interval
        self._chooser = chooser
        self._record = record
        self._clock = clock
        self._trains_on_cpu = trains_on_cpu
        # The step at which the newest save was attempted.
        self._tried_at_step: int | None = None

    # --- facts

    @property
    def is_enabled(self) -> bool:
        """Return whether this process saves checkpoints."""
        return self._interval is not None

    @property
    def has_tried(self) -> bool:
        """Return whether the first save has been attempted, or a checkpoint was loaded."""
        return self._tried_at_step is not None

    @property
    def has_new_steps(self) -> bool:
        """Return whether there are steps since the last attempt."""
        return self._record.global_step > (self._tried_at_step or 0)

    @property
    def global_step(self) -> int:
        """Return the number of optimizer steps that have updated the weights."""
        return self._record.global_step

    def is_due(self, after_steps: int = 0, saved_after: int | None = None) -> bool:
        """Return whether a save is due.

        Args:
            after_steps: If not 0, return whether a save will be due after this many more steps.
            saved_after: If not None, assume that a save will be made after this many more steps.
        """
        interval = self._interval
        if interval is None:
            return False
        step = self._record.global_step + after_steps
        last_step = self._tried_at_step
        if saved_after is not None:
            last_step = self._record.global_step + saved_after
        if last_step is None:
            return True
        now = self._clock.monotonic_seconds()
        is_overdue = saved_after is None and self._chooser.is_overdue(now, auto=interval == "auto")
        if step > last_step and is_overdue:
            return True
        # A multiple of the interval has been reached since the last attempt.
        return isinstance(interval, int) and step // interval > last_step // interval

    def is_soon(self, now: float) -> bool:
        """Return whether it is time to prepare the host buffers for the first periodic save.

        With "auto", this is shortly before the save is due, since a run that ends earlier needs no
        buffers.

        Args:
            now: The current time in seconds.
        """
        if self._interval != "auto":
            return True
        return self._chooser.is_overdue(now + _AHEAD_SECONDS, auto=True)

    def longest_save_seconds(self) -> float | None:
        """Return how long the longest recent save took in total, or None if none was measured."""
        return self._chooser.longest_save_seconds()

    # --- what happens to the run

    def note_boundary(self, now: float) -> None:
        """Record that a step has ended.

        Args:
            now: The current time in seconds.
        """
        self._chooser.boundary(now)

    def note_attempt(self) -> None:
        """Record that a save is attempted now, so that the next interval starts."""
        self._tried_at_step = self._record.global_step
        self._chooser.tried(self._clock.monotonic_seconds())

    def forget_attempt(self) -> None:
        """Record that the first save has failed, and must be attempted again."""
        self._tried_at_step = None

    def note_cost(self, save: Save) -> None:
        """Record how long a successful save took."""
        cpu_seconds = 0.0
        if self._trains_on_cpu:
            cpu_seconds = save.cpu_seconds
        if save.is_first:
            self._chooser.first_save_took(save.seconds, cpu_seconds=cpu_seconds)
        else:
            self._chooser.save_took(
                stall_seconds=save.stall_seconds or 0.0,
                seconds=save.seconds,
                cpu_seconds=cpu_seconds,
            )

    def note_resumed(self, costs: Iterable[SaveCost]) -> None:
        """Record that the run continues from a checkpoint, which starts the next interval.

        Args:
            costs: The costs of the saves before the checkpoint.
        """
        self._chooser.costs.extend(costs)
        self.note_attempt()

    def note_rollback(self, *, to_checkpoint: bool) -> None:
        """Record that the run has rolled back to an earlier step.

        Args:
            to_checkpoint: Whether the run has rolled back to a checkpoint rather than to a snapshot
                in host memory.
        """
        step = self._record.global_step
        if not to_checkpoint:
            # A snapshot does not restart the interval, but the last attempt must not be later than
            # the current step.
            step = min(self._tried_at_step or 0, step)
        self._tried_at_step = step


def chooser_of(policy: Policy) -> IntervalChooser:
    """Return an `IntervalChooser`, which chooses when to save, with the limits of a policy."""
    return IntervalChooser(
        mean_seconds_between_failures=3600 * policy.mean_time_between_failures_hours,
        most_overhead=policy.save_overhead,
        most_minutes=policy.save_interval_minutes,
    )
