"""Goodput: what the time of a run was spent on, and which share of it made steps.

The time is that of one process of each attempt, whose board has the seconds in each phase. Where no
process was observed, it is that of a guard, as far back as its recording reaches.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.recorder.progress import Phase
from holdfast.report.run_snapshot import Lane, ProcessSnapshot, RunSnapshot

# What the time in each phase counts as.
_USES = {
    Phase.FORWARD_BACKWARD: "steps",
    Phase.OPTIMIZER: "steps",
    Phase.DATA_WAIT: "waiting for data",
    Phase.EVALUATION: "validation",
    Phase.SAVING: "saves",
    Phase.END_OF_EPOCH: "between epochs",
    Phase.STARTING: "start-up",
    Phase.FIRST_STEP: "start-up",
    Phase.ENDING: "ending",
}
# Every use of time, in the order in which they are shown, with its colour.
COLOURS = {
    "steps": "#45a95a",
    "steps made again": "#e15759",
    "waiting for data": "#f28e2b",
    "validation": "#2aa8a8",
    "saves": "#4e8fd0",
    "between epochs": "#9d78c9",
    "start-up": "#8fa3b8",
    "ending": "#b8a26b",
    "down": "#8c3b3b",
    "between steps": "#8c8c8c",
}
# Events that a guard records while it works. Other events may come before the run is resumed.
_SIGNS_OF_WORK = frozenset(
    {"resumed", "loop", "checkpoint_saved", "validated", "closed", "left_by_exception"}
)


def goodput(run: RunSnapshot) -> dict[str, float]:
    """Return seconds by what they were spent on, "steps" first; empty if no step was recorded."""
    seconds = _seconds_of_attempts(run)
    if not seconds["steps"]:
        return _goodput_of_guard(run)
    seconds["steps"] -= seconds["steps made again"]
    return {use: spent for use, spent in seconds.items() if spent > 0}


# --- observed processes


@dataclass(frozen=True, slots=True, kw_only=True)
class _ObservedAttempt:
    """The time of an attempt, as one of its trainers has spent it.

    Args:
        process: The trainer.
        launched: Unix time at which the attempt was started.
        started: Unix time at which the trainer began to observe itself, when Python had started.
        lasted_seconds: Time from then until it ended.
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
        """Return the seconds in each phase, by the number of the phase.

        The phase in which the process ended has no end on its board. It gets the rest of the time,
        so a hang counts as the phase in which it happened.
        """
        seconds = list(self.process.spent)
        if self.process.phase is not None:
            seconds[self.process.phase] += self.lasted_seconds - sum(seconds)
        return seconds

    @property
    def step_seconds(self) -> float:
        """Return the seconds in steps that have ended."""
        spent = self.process.spent
        return spent[Phase.FORWARD_BACKWARD] + spent[Phase.OPTIMIZER]


def _seconds_of_attempts(run: RunSnapshot) -> dict[str, float]:
    """Return the seconds of all observed attempts by use; "steps" has all steps."""
    attempts = _observed_attempts(run)
    lanes = [item.process.lane for item in attempts.values() if item.process.lane is not None]
    shares_made_again = _shares_made_again(run, lanes)

    seconds = dict.fromkeys(COLOURS, 0.0)
    # If the first attempt was not observed, the run was down since it began.
    previous_end = None if 0 in attempts else run.began
    for attempt in attempts.values():
        by_phase = attempt.seconds_by_phase()
        for phase, use in _USES.items():
            seconds[use] += by_phase[phase]
        share_made_again = shares_made_again.get(attempt.process.label, 0.0)
        seconds["steps made again"] += attempt.step_seconds * share_made_again
        seconds["start-up"] += attempt.started - attempt.launched
        if previous_end:
            seconds["down"] += max(0.0, attempt.launched - previous_end)
        previous_end = attempt.ended
    return seconds


def _observed_attempts(run: RunSnapshot) -> dict[int, _ObservedAttempt]:
    """Return the attempts that can be accounted for, by number, oldest first.

    Of the trainers of an attempt the one with the lowest rank represents it.
    """
    trainers: dict[int, ProcessSnapshot] = {}
    for process in sorted(run.processes, key=_rank):
        if process.info is not None and process.role == "trainer" and any(process.spent):
            trainers.setdefault(process.info.attempt, process)
    return {number: _observed_attempt(run, number, trainers[number]) for number in sorted(trainers)}


def _rank(process: ProcessSnapshot) -> int:
    if process.info is None or process.info.rank is None:
        return 0
    return process.info.rank


def _observed_attempt(run: RunSnapshot, number: int, process: ProcessSnapshot) -> _ObservedAttempt:
    assert process.info is not None
    started = process.info.started
    launched = _time_of(run, "attempt_started", number)
    if number == 0 and run.began:
        launched = run.began
    ended = _time_of(run, "attempt_ended", number)
    if ended is None:
        ended = process.ended or 0.0
    return _ObservedAttempt(
        process=process,
        launched=started if launched is None else min(launched, started),
        started=started,
        # Phases that took longer than the recorded end allows are believed.
        lasted_seconds=max(ended - started, sum(process.spent)),
    )


def _time_of(run: RunSnapshot, kind: str, attempt: int) -> float | None:
    """Return the Unix time of the newest event of a kind that is about an attempt, or None."""
    times = [
        recorded.event.unix_seconds
        for recorded in run.events
        if recorded.event.kind == kind and recorded.event.data.get("attempt") == attempt
    ]
    return times[-1] if times else None


# --- a guard without observed processes


def _goodput_of_guard(run: RunSnapshot) -> dict[str, float]:
    """Return the seconds by use of a guard, which knows its steps and when the run was resumed."""
    lane = _lane_of_guard(run)
    if lane is None:
        return {}
    signs = _signs_of_work(run, lane)
    gaps = breaks(run, lane)
    finished = {
        recorded.event.unix_seconds
        for recorded in run.events
        if recorded.event.data.get("how") == "finished"
    }
    idle_seconds = sum(resumed - last_sign for last_sign, resumed in gaps)
    # A run that has finished is not down until it is started again.
    down_seconds = sum(
        resumed - last_sign for last_sign, resumed in gaps if last_sign not in finished
    )
    step_seconds = float(lane.times.seconds.sum())
    working_seconds = max(signs[-1] - signs[0] - idle_seconds, step_seconds)
    again_seconds = step_seconds * _shares_made_again(run, [lane])[lane.label]
    others = {
        "steps made again": again_seconds,
        "between steps": working_seconds - step_seconds,
        "down": down_seconds,
    }
    return {
        "steps": step_seconds - again_seconds,
        **{use: seconds for use, seconds in others.items() if seconds > 0},
    }


def _lane_of_guard(run: RunSnapshot) -> Lane | None:
    """Return the lane of the guard of the first rank, or None."""
    for lane in run.lanes:
        if lane.of_guard and lane.begun and not lane.rank:
            return lane
    return None


def breaks(run: RunSnapshot, lane: Lane) -> list[tuple[float, float]]:
    """Return when a guard's run was not trained, as pairs of Unix times.

    A break lasts from the last sign of one process until the next process has resumed the run.
    """
    resumed = {
        recorded.event.unix_seconds for recorded in run.events if recorded.event.kind == "resumed"
    }
    return [
        (last_sign, sign)
        for last_sign, sign in itertools.pairwise(_signs_of_work(run, lane))
        if sign in resumed
    ]


def _signs_of_work(run: RunSnapshot, lane: Lane) -> list[float]:
    """Return the Unix times, in order, at which a guard is known to have worked."""
    times = {lane.begun or 0.0, *lane.times.unix_seconds.tolist()}
    for recorded in run.events:
        if recorded.source == lane.label and recorded.event.kind in _SIGNS_OF_WORK:
            times.add(recorded.event.unix_seconds)
    return sorted(times)


# --- steps that were made again


def _shares_made_again(run: RunSnapshot, lanes: Sequence[Lane]) -> dict[str, float]:
    """Return which share of the time of their steps lanes spent on steps that were made before.

    Args:
        run: The run.
        lanes: One lane for each attempt, oldest first.

    Returns:
        Shares by the label of the lane.
    """
    returns = sorted(
        recorded.event.unix_seconds
        for recorded in run.events
        if recorded.event.kind in ("resumed", "rolled_back")
    )
    progress = _Progress(returns, has_guard=bool(run.guards))
    shares = {}
    for lane in lanes:
        progress.begin_lane()
        again_seconds = 0.0
        all_seconds = 0.0
        times = lane.times
        for time, step, count, seconds in zip(
            times.unix_seconds.tolist(),
            times.steps.tolist(),
            times.counts.tolist(),
            times.seconds.tolist(),
            strict=True,
        ):
            again_seconds += seconds * progress.add(time, step, max(count, 1.0))
            all_seconds += seconds
        shares[lane.label] = again_seconds / all_seconds if all_seconds else 0.0
    return shares


class _Progress:
    """How far a run had come, to tell which of its steps are made again.

    Args:
        returns: Unix times, in order, of events after which the run may be at an earlier step.
        has_guard: Whether a guard counts the steps over all attempts.
    """

    def __init__(self, returns: Sequence[float], *, has_guard: bool) -> None:
        self._returns = returns
        self._has_guard = has_guard
        # The last step that was ever made, and the same at the newest return.
        self._reached = 0.0
        self._reached_before_return = 0.0
        self._last_step = 0.0
        # How many returns have happened; None at the beginning of a lane, which is a return too.
        self._returns_so_far: int | None = None

    def begin_lane(self) -> None:
        """Go on with the steps of the next attempt."""
        self._returns_so_far = None

    def add(self, time: float, step: float, count: float) -> float:
        """Add a stretch of steps, and return which share of it was made before.

        Args:
            time: Unix time of the stretch.
            step: Its first step.
            count: Its number of steps.
        """
        returns_so_far = bisect_right(self._returns, time)
        has_returned = self._returns_so_far is None or returns_so_far > self._returns_so_far
        if has_returned or step < self._last_step:
            # Without a guard, a script that starts again at step 1 may have loaded its own
            # checkpoint and count its steps from there.
            if step <= 1 and not self._has_guard:
                self._reached = 0.0
            self._reached_before_return = self._reached
        self._returns_so_far = returns_so_far
        self._last_step = step
        self._reached = max(self._reached, step + count - 1)
        made_before = self._reached_before_return - step + 1
        return min(max(made_before / count, 0.0), 1.0)
