"""Compute goodput: how a run spent its time, and which share of it went into useful steps.

An observed process publishes the number of seconds that it has spent in each phase. One such
process represents each attempt. If no process was observed, the times are taken from the recording
of a guard, as far back as it goes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.recorder.progress import ProcessPhase
from holdfast.report.page.gathered_run import GatheredRun
from holdfast.report.run_snapshot import Lane, ProcessSnapshot

# The use of time that each phase counts as.
_USES = {
    ProcessPhase.FORWARD_BACKWARD: "steps",
    ProcessPhase.OPTIMIZER: "steps",
    ProcessPhase.DATA_WAIT: "waiting for data",
    ProcessPhase.EVALUATION: "validation",
    ProcessPhase.SAVING: "saves",
    ProcessPhase.END_OF_EPOCH: "between epochs",
    ProcessPhase.STARTING: "start-up",
    ProcessPhase.FIRST_STEP: "start-up",
    ProcessPhase.ENDING: "ending",
}
# The color of each use of time, in display order.
COLOURS = {
    "steps": "#45a95a",
    "repeated steps": "#e15759",
    "waiting for data": "#f28e2b",
    "validation": "#2aa8a8",
    "saves": "#4e8fd0",
    "between epochs": "#9d78c9",
    "start-up": "#8fa3b8",
    "ending": "#b8a26b",
    "down": "#8c3b3b",
    "between steps": "#8c8c8c",
}
# Kinds of events that a guard records only while it trains. Other events may be recorded before a
# run has resumed.
_SIGNS_OF_WORK = frozenset(
    {"resumed", "loop", "checkpoint_saved", "validated", "closed", "left_by_exception"}
)


def goodput(run: GatheredRun) -> dict[str, float]:
    """Return the seconds spent on each use of time; empty if no steps were recorded.

    The entry "steps" comes first. It does not include repeated steps.
    """
    seconds = _seconds_of_attempts(run)
    if not seconds["steps"]:
        return _goodput_of_guard(run)
    seconds["steps"] -= seconds["repeated steps"]
    return {use: spent for use, spent in seconds.items() if spent > 0}


# --- observed processes


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttemptTime:
    """The time that an attempt took, according to one of its trainers.

    Args:
        process: The trainer.
        launched: Unix time at which the supervisor started the attempt.
        started: Unix time at which observation of the trainer began, which is after Python started.
        lasted_seconds: Time from `started` to the end of the trainer.
    """

    process: ProcessSnapshot
    launched: float
    started: float
    lasted_seconds: float

    @property
    def ended(self) -> float:
        """Return the Unix time at which the trainer ended."""
        return self.started + self.lasted_seconds

    def seconds_by_phase(self) -> list[float]:
        """Return the number of seconds spent in each phase, indexed by phase number.

        The progress board does not record the end of the last phase, so all of the remaining time
        counts toward that phase. A hang counts toward the phase in which it occurred.
        """
        seconds = list(self.process.spent)
        if self.process.phase is not None:
            seconds[self.process.phase] += self.lasted_seconds - sum(seconds)
        return seconds

    @property
    def step_seconds(self) -> float:
        """Return the number of seconds spent in completed steps."""
        spent = self.process.spent
        return spent[ProcessPhase.FORWARD_BACKWARD] + spent[ProcessPhase.OPTIMIZER]


def _seconds_of_attempts(run: GatheredRun) -> dict[str, float]:
    """Return the seconds that all observed attempts spent on each use of time.

    Repeated steps are included in both "steps" and "repeated steps".
    """
    attempts = _attempt_times(run)
    lanes = [item.process.lane for item in attempts.values() if item.process.lane is not None]
    repeated_shares = _shares_repeated(run, lanes)

    seconds = dict.fromkeys(COLOURS, 0.0)
    # If the first attempt was not observed, the run counts as down from its start until the first
    # observed attempt.
    previous_end = None if 0 in attempts else run.began
    for attempt in attempts.values():
        by_phase = attempt.seconds_by_phase()
        for phase, use in _USES.items():
            seconds[use] += by_phase[phase]
        repeated_share = repeated_shares.get(attempt.process.label, 0.0)
        seconds["repeated steps"] += attempt.step_seconds * repeated_share
        seconds["start-up"] += attempt.started - attempt.launched
        if previous_end:
            seconds["down"] += max(0.0, attempt.launched - previous_end)
        previous_end = attempt.ended
    return seconds


def _attempt_times(run: GatheredRun) -> dict[int, _AttemptTime]:
    """Return the known times of attempts, keyed by attempt number, oldest first.

    Each attempt is represented by its trainer with the lowest rank.
    """
    trainers: dict[int, ProcessSnapshot] = {}
    for process in sorted(run.processes, key=_rank):
        if process.info is not None and process.role == "trainer" and any(process.spent):
            trainers.setdefault(process.info.attempt, process)
    return {number: _attempt_time(run, number, trainers[number]) for number in sorted(trainers)}


def _rank(process: ProcessSnapshot) -> int:
    if process.info is None or process.info.rank is None:
        return 0
    return process.info.rank


def _attempt_time(run: GatheredRun, number: int, process: ProcessSnapshot) -> _AttemptTime:
    assert process.info is not None
    started = process.info.started
    launched = _time_of(run, "attempt_started", number)
    if number == 0 and run.began:
        launched = run.began
    ended = _time_of(run, "attempt_ended", number)
    if ended is None:
        ended = process.ended or 0.0
    return _AttemptTime(
        process=process,
        launched=started if launched is None else min(launched, started),
        started=started,
        # If the phases together took longer than that, trust them more than the recorded end.
        lasted_seconds=max(ended - started, sum(process.spent)),
    )


def _time_of(run: GatheredRun, kind: str, attempt: int) -> float | None:
    """Return the Unix time of the newest event of a kind in an attempt, or None."""
    times = [
        recorded.event.unix_seconds
        for recorded in run.events
        if recorded.event.kind == kind and recorded.event.data.get("attempt") == attempt
    ]
    return times[-1] if times else None


# --- a guard without observed processes


def _goodput_of_guard(run: GatheredRun) -> dict[str, float]:
    """Return the seconds spent on each use of time, based on a guard's steps and events."""
    lane = _lane_of_guard(run)
    if lane is None:
        return {}
    signs_of_work = _signs_of_work(run, lane)
    breaks_of_guard = breaks(run, lane)
    times_of_finish = {
        recorded.event.unix_seconds
        for recorded in run.events
        if recorded.event.data.get("how") == "finished"
    }
    break_seconds = sum(resumed - last_sign for last_sign, resumed in breaks_of_guard)
    # A break after the run had finished does not count as down, because there was nothing to do.
    down_seconds = sum(
        resumed - last_sign
        for last_sign, resumed in breaks_of_guard
        if last_sign not in times_of_finish
    )
    step_seconds = float(lane.times.seconds.sum())
    seconds_without_breaks = signs_of_work[-1] - signs_of_work[0] - break_seconds
    working_seconds = max(seconds_without_breaks, step_seconds)
    repeated_seconds = step_seconds * _shares_repeated(run, [lane])[lane.label]
    others = {
        "repeated steps": repeated_seconds,
        "between steps": working_seconds - step_seconds,
        "down": down_seconds,
    }
    return {
        "steps": step_seconds - repeated_seconds,
        **{use: seconds for use, seconds in others.items() if seconds > 0},
    }


def _lane_of_guard(run: GatheredRun) -> Lane | None:
    """Return the lane of the first rank's guard, or None if no guard recorded steps."""
    for lane in run.lanes:
        if lane.of_guard and lane.begun and not lane.rank:
            return lane
    return None


def breaks(run: GatheredRun, lane: Lane) -> list[tuple[float, float]]:
    """Return the breaks between successive processes of a guarded run, as pairs of Unix times.

    A break starts at the last sign of work of one process, and ends when the next process has
    resumed the run.
    """
    resumed = {
        recorded.event.unix_seconds for recorded in run.events if recorded.event.kind == "resumed"
    }
    return [
        (last_sign, sign)
        for last_sign, sign in itertools.pairwise(_signs_of_work(run, lane))
        if sign in resumed
    ]


def _signs_of_work(run: GatheredRun, lane: Lane) -> list[float]:
    """Return the sorted Unix times at which a guard's steps and events show that it was working."""
    times = {lane.begun or 0.0, *lane.times.unix_seconds.tolist()}
    for recorded in run.events:
        if recorded.source == lane.label and recorded.event.kind in _SIGNS_OF_WORK:
            times.add(recorded.event.unix_seconds)
    return sorted(times)


# --- repeated steps


def _shares_repeated(run: GatheredRun, lanes: Sequence[Lane]) -> dict[str, float]:
    """Return, for each lane, the share of its step time that was spent repeating earlier steps.

    Args:
        run: The run.
        lanes: One lane for each attempt, oldest first.

    Returns:
        The shares, from 0 to 1, keyed by lane label.
    """
    rewinds = sorted(
        recorded.event.unix_seconds
        for recorded in run.events
        if recorded.event.kind in ("resumed", "rolled_back")
    )
    tracker = _RepeatTracker(rewinds, has_guard=bool(run.guards))
    shares = {}
    for lane in lanes:
        tracker.begin_lane()
        repeated_seconds = 0.0
        all_seconds = 0.0
        times = lane.times
        for time, step, count, seconds in zip(
            times.unix_seconds.tolist(),
            times.steps.tolist(),
            times.counts.tolist(),
            times.seconds.tolist(),
            strict=True,
        ):
            repeated_seconds += seconds * tracker.add(time, step, max(count, 1.0))
            all_seconds += seconds
        shares[lane.label] = repeated_seconds / all_seconds if all_seconds else 0.0
    return shares


class _RepeatTracker:
    """Tracks the highest step that a run has reached, to find repeated steps.

    Args:
        rewinds: Sorted Unix times of resumes and rollbacks, each of which may return to an earlier
            step.
        has_guard: Whether a guard numbers the steps, so that the numbers continue across attempts.
    """

    def __init__(self, rewinds: Sequence[float], *, has_guard: bool) -> None:
        self._rewinds = rewinds
        self._has_guard = has_guard
        # The highest step so far, and the highest step before the last rewind.
        self._reached = 0.0
        self._reached_before_rewind = 0.0
        self._last_step = 0.0
        # The number of rewinds so far. Before the first step of a lane, it is -1, so that this step
        # counts as a rewind.
        self._rewinds_so_far = -1

    def begin_lane(self) -> None:
        """Prepare for the steps of the next attempt."""
        self._rewinds_so_far = -1

    def add(self, time: float, step: float, count: float) -> float:
        """Add a range of steps, and return the share of the range that repeats earlier steps.

        Args:
            time: Unix time of the range.
            step: First step of the range.
            count: Number of steps in the range.
        """
        rewinds_so_far = bisect_right(self._rewinds, time)
        if rewinds_so_far > self._rewinds_so_far or step < self._last_step:
            # Without a guard, a script that counts from step 1 again may have resumed from its own
            # checkpoint, so its steps do not count as repeated.
            if step <= 1 and not self._has_guard:
                self._reached = 0.0
            self._reached_before_rewind = self._reached
        self._rewinds_so_far = rewinds_so_far
        self._last_step = step
        # The range contains the steps from `step` to `step + count - 1`.
        self._reached = max(self._reached, step + count - 1)
        repeated_steps = self._reached_before_rewind - step + 1
        return min(max(repeated_steps / count, 0.0), 1.0)
