"""`TimeLimit`: stop a run early enough to save a checkpoint before its time is over.

The time is over once `Policy.max_time` has passed since the start of the process or, under Slurm,
at the end of the job, whichever comes first.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from holdfast.core.clock import Clock
from holdfast.core.events import run_events
from holdfast.core.policy.durations import seconds_of
from holdfast.core.text import duration
from holdfast.guard.record import RunRecord
from holdfast.guard.run.slurm import end_of_job, job_of
from holdfast.guard.saving.saves import Saving
from holdfast.guard.stop import StopRequest

# The time of this many saves is kept free at the end. The last save has to wait for a save that may
# have just started in the background.
_SAVES_AT_END = 2
# The assumed duration of a save before one was measured, in seconds. It is the time between SIGTERM
# and SIGKILL that Slurm (`KillWait`) and Kubernetes (`terminationGracePeriodSeconds`) allow by
# default, so a save that takes longer would not survive a SIGTERM either.
_UNMEASURED_SAVE_SECONDS = 30.0
# The time that is kept free in a Slurm job for what follows the last save, in seconds: the
# processes exit, and the job's script or ``holdfast run`` asks Slurm to requeue the job. At the end
# of the job, Slurm kills the script, which then cannot ask any more.
_EXIT_SECONDS = 10.0
# The position of a process's start time in `/proc/PID/stat`, among the fields after its name. It is
# field 22 in proc(5), counted from 1, and its unit is clock ticks since the system has booted.
_START_FIELD = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deadline:
    """A time by which the run must have stopped."""

    # The time on the monotonic clock, in seconds.
    seconds: float
    # What happens at that time, as a clause.
    consequence: str
    # The time that is kept free for what follows the last save, in seconds.
    exit_seconds: float = 0.0


class TimeLimit:
    """Asks a run to stop while there is still time for a save.

    At each boundary, the remaining time is compared with the duration of the longest step so far
    plus that of two saves and, in a Slurm job, ten seconds for the exit. The duration of a step is
    the time from one boundary to the next. It includes everything that the script does there, so
    the run stops before a validation that would not finish if it took as long as an earlier one.

    Args:
        max_time: See `Policy.max_time`. None if this process does not watch the time.
        stop: The stop request of this rank.
        saving: The object that measures how long saves take.
        record: The record that counts steps and receives events.
        clock: The source of time.
        steps_until_stop: The number of steps that the run still makes after a request.
    """

    def __init__(
        self,
        max_time: str | timedelta | None,
        stop: StopRequest,
        saving: Saving,
        record: RunRecord,
        clock: Clock,
        *,
        steps_until_stop: int,
    ) -> None:
        self._max_time = max_time
        self._stop = stop
        self._saving = saving
        self._record = record
        self._clock = clock
        self._steps_until_stop = steps_until_stop
        # The time by which the run must have stopped. None if there is none, or before `_begin`.
        self._deadline: _Deadline | None = None
        # Whether `_begin` was called.
        self._has_begun = False
        # The global step at the last boundary that followed a step, and the time of that boundary.
        self._last_step = 0
        self._last_time = 0.0
        # The duration of the first step in this process. It includes work that is done only once,
        # such as compiling the model, so it is used only until a second step has been made.
        self._first_step_seconds: float | None = None
        # The duration of the longest of all later steps in this process.
        self._longest_step_seconds: float | None = None

    def check(self) -> None:
        """Ask for a stop if the next step might not leave enough time to save.

        This is called at every boundary. Before the first step of this process, it asks for
        nothing. Otherwise, a run that is restarted again and again might make no progress, and a
        run that has already reached its limits might end as stopped instead of finished.
        """
        if self._max_time is None:
            return
        now = self._clock.monotonic_seconds()
        if not self._has_begun:
            self._begin(now)
        self._measure_step(now)
        step_seconds = self._longest_step_seconds
        if step_seconds is None:
            step_seconds = self._first_step_seconds
        if self._deadline is None or step_seconds is None:
            return
        save_seconds = self._saving.longest_save_seconds()
        if save_seconds is None:
            save_seconds = _UNMEASURED_SAVE_SECONDS
        remaining = self._deadline.seconds - now
        needed = (1 + self._steps_until_stop) * step_seconds + _SAVES_AT_END * save_seconds
        if remaining <= needed + self._deadline.exit_seconds:
            reason = (
                f"max_time: {duration(max(0.0, remaining))} until {self._deadline.consequence};"
                f" a step takes up to {duration(step_seconds)}"
                f" and a save up to {duration(save_seconds)}"
            )
            self._stop.request(reason, ends_process=True)

    def _begin(self, now: float) -> None:
        """Determine the time by which the run must have stopped, and record it.

        Args:
            now: The current time on the monotonic clock.
        """
        self._has_begun = True
        self._last_step = self._record.global_step
        self._last_time = now
        deadlines = [self._deadline_of_max_time(now), self._deadline_of_job(now)]
        self._deadline = min(
            (deadline for deadline in deadlines if deadline is not None),
            key=lambda deadline: deadline.seconds - deadline.exit_seconds,
            default=None,
        )
        if self._deadline is not None:
            end = self._clock.unix_seconds() + self._deadline.seconds - now
            self._record.emit(run_events.TimeLimited(end=end, what=self._deadline.consequence))

    def _measure_step(self, now: float) -> None:
        """Measure the step before this boundary. If there was none, its time counts to the next.

        There was none, for example, after a batch whose gradients are accumulated, or if the step
        was skipped.
        """
        if self._record.global_step == self._last_step:
            return
        seconds = now - self._last_time
        self._last_step = self._record.global_step
        self._last_time = now
        if self._first_step_seconds is None:
            self._first_step_seconds = seconds
        else:
            self._longest_step_seconds = max(self._longest_step_seconds or 0.0, seconds)

    def _deadline_of_max_time(self, now: float) -> _Deadline | None:
        """Return when `Policy.max_time` has passed. None if it is ``"auto"``."""
        if self._max_time is None or self._max_time == "auto":
            return None
        # The difference is negative if the clock is not the system's.
        age = max(0.0, self._clock.unix_seconds() - _process_start_time())
        return _Deadline(
            seconds=now - age + seconds_of(self._max_time),
            consequence=f"the process has run for {self._max_time}",
        )

    def _deadline_of_job(self, now: float) -> _Deadline | None:
        """Return when Slurm ends the job. None without Slurm, or if the time is unknown."""
        job = job_of(os.environ)
        if job is None:
            return None
        unix_now = self._clock.unix_seconds()
        try:
            end = end_of_job(os.environ, unix_now)
        except ValueError as error:
            self._record.emit(run_events.EndOfJobUnknown(job=job, why=str(error)))
            return None
        return _Deadline(
            seconds=now + end - unix_now,
            consequence=f"Slurm ends job {job}",
            exit_seconds=_EXIT_SECONDS,
        )


def _process_start_time() -> float:
    """Return the Unix time at which this process was started."""
    # Split after the last parenthesis, because the name of the process, which is in parentheses,
    # may itself contain spaces and parentheses.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    started_after_boot = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started_after_boot)
