"""Extract individual facts from a run's evidence, such as growing memory or failed saves.

`wording.remarks` turns these facts into sentences, and `exhibits` turns them into pieces of
evidence. `causes.choosing` decides which cause ended the run.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.events.event import Event
from holdfast.core.run_requests import REQUESTED_FROM_OUTSIDE
from holdfast.core.text import counted
from holdfast.explain.evidence import Ending, Evidence, Statement
from holdfast.explain.exit_status import is_signal_name

# Events that record the outcome of saving a checkpoint.
_EVENTS_OF_SAVES = ("checkpoint_saved", "save_failed", "save_refused")
# Events that show whether a checkpoint contains a Guard's newest state.
_EVENTS_ABOUT_SAVING = ("not_saved", "checkpoint_saved", "saved", "loop")
# DeepSpeed logs the use of host memory. From 85 % on, the next allocation may be the last one.
_FULL_HOST_MEMORY = re.compile(
    r"\bCPU Virtual Memory: {1,4}used = [\d.]{1,12} GB, percent = (?:8[5-9]|9\d|100)(?:\.\d{1,4})?%"
)
_FULL_DISK_MESSAGES = ("No space left on device", "Disk quota exceeded")


# --- Memory ---------------------------------------------------------------------------------------


def newest_leak(evidence: Evidence) -> Event | None:
    """Return the newest event that reports a traced memory leak, or None if there is none."""
    return _newest_event(evidence.events, "leak")


def newest_memory_trend(evidence: Evidence) -> Event | None:
    """Return the newest event that reports memory growing from step to step.

    Return None if there is no such event, or if the newest event says that the growth has ended.
    """
    trend = _newest_event(evidence.events, "memory_trend")
    if trend is None or not trend.data.get("bytes_per_step"):
        return None
    return trend


def host_memory_was_running_out(evidence: Evidence) -> bool:
    """Return whether the newest trend of host memory predicted when memory would run out."""
    trends = [
        event
        for event in evidence.events
        if event.kind == "memory_trend" and event.data.get("what") == "host"
    ]
    return bool(trends) and isinstance(trends[-1].data.get("minutes_left"), (int, float))


def log_shows_full_host_memory(evidence: Evidence) -> bool:
    """Return whether the log reports that host memory was nearly full, as DeepSpeed does."""
    return any(_FULL_HOST_MEMORY.search(line.text) for line in evidence.statements)


def leak_place(leak: Event) -> str:
    """Return the location in the code that keeps leaked memory alive, or "" if it is unknown."""
    place = leak.data.get("retained_at")
    if isinstance(place, str) and place.strip(" ?"):
        return place
    return ""


def count_kernel_kills(endings: Iterable[Ending]) -> int | None:
    """Return how many processes the kernel killed for lack of memory, or None if unknown.

    The number is the largest increase in the control group's ``oom_kill`` counter that an ending
    recorded.
    """
    counts = [ending.oom_kills for ending in endings if ending.oom_kills is not None]
    return max(counts, default=None)


# --- Guards ---------------------------------------------------------------------------------------


def training_faults(evidence: Evidence) -> list[Event]:
    """Return the training faults that a Guard found: the newest one for each rule and location.

    The faults are sorted: causes before symptoms, then errors before advice, then by descending
    confidence.
    """
    newest: dict[tuple[str, str], Event] = {}
    for event in evidence.events:
        # In a damaged recording, the rule or the text may be missing.
        is_sound = isinstance(event.data.get("rule"), str) and isinstance(
            event.data.get("what"), str
        )
        if event.kind == "finding" and is_sound:
            newest[event.data["rule"], str(event.data.get("where"))] = event
    return sorted(newest.values(), key=_importance_of_finding)


def _importance_of_finding(finding: Event) -> tuple[bool, bool, float]:
    """Return a sort key that puts the most important finding first."""
    confidence = finding.data.get("confidence")
    return (
        finding.data.get("about") == "symptom",
        finding.data.get("severity") != "error",
        -float(confidence) if isinstance(confidence, (int, float)) else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsavedSteps:
    """The steps that are in no checkpoint because a Guard could not save its newest state.

    Attributes:
        newest_checkpoint: The step of the newest checkpoint, or None if there is no checkpoint.
        step: The step at which the Guard closed.
        failed_saves: The number of saves that failed.
        reason: Why the newest save failed, in a few words; empty if not recorded.
        was_refused: Whether the Guard refused the newest save because the training state contained
            NaN or Inf.
    """

    newest_checkpoint: object
    step: int
    failed_saves: object
    reason: str
    was_refused: bool

    def newest_checkpoint_clause(self) -> str:
        """Return a clause that names the newest checkpoint's step or says that there is none."""
        if self.newest_checkpoint is None:
            return "nothing was saved"
        return f"its newest checkpoint is from step {self.newest_checkpoint}"

    def clause_with_reason(self) -> str:
        """Return a clause that names the newest checkpoint and, if known, why the save failed."""
        return (
            f"{self.newest_checkpoint_clause()} ({self.reason})"
            if self.reason
            else self.newest_checkpoint_clause()
        )

    def clause(self) -> str:
        """Return a clause for use within a sentence, without a capital letter or a period."""
        return (
            f"{self.newest_checkpoint_clause()}, although it had reached step {self.step}"
            f" (failed saves: {self.failed_saves})"
        )


def unsaved_steps(evidence: Evidence) -> UnsavedSteps | None:
    """Return the steps that a Guard could not save before it closed.

    Return None if a checkpoint contains all of the Guard's steps.
    """
    newest = _newest_event(evidence.events, *_EVENTS_ABOUT_SAVING)
    if newest is None or newest.kind != "not_saved":
        return None
    newest_save = _newest_event(evidence.events, *_EVENTS_OF_SAVES)
    was_refused = newest_save is not None and newest_save.kind == "save_refused"
    error = newest.data.get("error")
    return UnsavedSteps(
        newest_checkpoint=newest.data.get("newest_checkpoint"),
        step=newest.global_step,
        failed_saves=newest.data.get("failed_saves"),
        reason=str(error) if was_refused else _reason_of_failed_save(error),
        was_refused=was_refused,
    )


def _reason_of_failed_save(error: object) -> str:
    """Return why a save failed, or an empty string if the error was not recorded."""
    if not isinstance(error, str):
        # Older versions of holdfast did not record the error.
        return ""
    if any(message in error for message in _FULL_DISK_MESSAGES):
        return "the disk is full"
    # Remove the name of the exception's class.
    return error.partition(": ")[2] or error


@dataclass(frozen=True, slots=True, kw_only=True)
class LateSteps:
    """How many steps a Guard decided late, and how many of them the device refused."""

    steps: int
    repeated: int


def late_steps(evidence: Evidence) -> LateSteps | None:
    """Return how many steps were decided late, or None if there were none."""
    event = _newest_event(evidence.events, "late_steps")
    if event is None:
        return None
    steps = event.data.get("steps")
    repeated = event.data.get("repeated")
    # In a damaged recording, a count may be missing.
    if not isinstance(steps, int) or not isinstance(repeated, int):
        return None
    return LateSteps(steps=steps, repeated=repeated)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferingRepetitions:
    """The steps that gave other bits when a Guard repeated them.

    Attributes:
        first: The event about the first of these steps.
        count: The number of these steps, as far as they were recorded.
        repeated: The number of steps that had been repeated by then, or None if not recorded.
    """

    first: Event
    count: int
    repeated: int | None

    def clause(self) -> str:
        """Return a clause for use within a sentence, without a capital letter or a period."""
        if self.repeated is None:
            return f"{counted(self.count, 'repeated step')} gave other bits"
        return f"{self.count:,} of {counted(self.repeated, 'repeated step')} gave other bits"


def differing_repetitions(evidence: Evidence) -> DifferingRepetitions | None:
    """Return the repeated steps that gave other bits, or None if there were none."""
    events = [event for event in evidence.events if event.kind == "repetition_differed"]
    if not events:
        return None
    # The newest event has the highest count, unless the run was resumed since then.
    count = events[-1].data.get("count")
    repeated = events[-1].data.get("repeated")
    if not isinstance(count, int) or not isinstance(repeated, int) or count < len(events):
        return DifferingRepetitions(first=events[0], count=len(events), repeated=None)
    return DifferingRepetitions(first=events[0], count=count, repeated=repeated)


def stop_request(events: Iterable[Event]) -> Event | None:
    """Return the newest request to stop a Guard.

    Return None if there was no request, or if a training loop started after the request.

    Args:
        events: The events of a Guard, oldest first.
    """
    request = None
    for event in events:
        if event.kind == "stop_requested":
            request = event
        elif event.kind in ("loop", "resumed"):
            request = None
    return request


def unanswered_signal(events: Iterable[Event]) -> Event | None:
    """Return the newest signal that asked a Guard to stop, if the Guard did not stop after it.

    Return None if there was no such signal, or if a later event shows that the Guard reached a
    boundary, closed, or was started again.

    Args:
        events: The events of a Guard, oldest first.
    """
    newest = _newest_event(
        events, "stop_signal", "stop_requested", "closed", "left_by_exception", "loop", "resumed"
    )
    if newest is None or newest.kind != "stop_signal":
        return None
    return newest


def source_of_stop(request: Event) -> str | None:
    """Return what requested a stop: the name of a signal, "max_time" or "holdfast stop".

    Return None if the script itself requested it.
    """
    for value in (request.data.get("signal"), request.data.get("reason")):
        source = source_of_reason(value)
        if source is not None:
            return source
    return None


def source_of_reason(reason: object) -> str | None:
    """Return what requested a stop, as `source_of_stop` does.

    Args:
        reason: The reason that a Guard recorded for the stop.
    """
    if not isinstance(reason, str):
        return None
    if is_signal_name(reason):
        return reason
    if reason == REQUESTED_FROM_OUTSIDE:
        return "holdfast stop"
    # `guard.run.time_limit` begins its reasons with this word.
    if reason.startswith("max_time:"):
        return "max_time"
    return None


def closed_after(events: Iterable[Event], request: Event) -> bool:
    """Return whether a Guard stopped and closed at or after the time of a stop request."""
    for event in events:
        is_stop = event.kind == "closed" and event.data.get("how") == "stopped"
        if is_stop and event.unix_seconds >= request.unix_seconds:
            return True
    return False


# --- Processes ------------------------------------------------------------------------------------


def was_stopped_by_holdfast(ending: Ending, status: int) -> bool:
    """Return whether the supervisor ended a process with SIGTERM or SIGKILL.

    Args:
        ending: How the process ended.
        status: The exit status of the process, as in `Ending.status`.
    """
    return ending.sent_by == "supervisor" and status in (-signal.SIGTERM, -signal.SIGKILL)


def ignored_hang(evidence: Evidence) -> Event | None:
    """Return the newest hang that the supervisor reported without ending the attempt.

    Return None if there is no such hang, or if a step was completed after the hang.
    """
    hangs = [
        event
        for event in evidence.events
        if event.kind == "hang" and event.data.get("remedy") == "wait"
    ]
    if not hangs:
        return None
    step_of_hang = hangs[-1].data.get("step")
    if evidence.steps is None or not isinstance(step_of_hang, int):
        return hangs[-1]
    return hangs[-1] if evidence.steps <= step_of_hang else None


def final_traceback(evidence: Evidence) -> Statement | None:
    """Return the exception whose traceback ends the output.

    Return None if the output does not end with a traceback, or if other evidence already shows
    whether that exception ended its process.
    """
    for statement in reversed(evidence.statements):
        if statement.kind == "exception" and statement.ends_output and statement.fatal is None:
            return statement
    return None


def was_not_observed(evidence: Evidence) -> bool:
    """Return whether a supervised run has no evidence of its success except its exit status."""
    return evidence.observed is False and not evidence.output_says_done


def _newest_event(events: Iterable[Event], *kinds: str) -> Event | None:
    """Return the last event of one of the given kinds, or None if there is no such event."""
    newest = None
    for event in events:
        if event.kind in kinds:
            newest = event
    return newest
