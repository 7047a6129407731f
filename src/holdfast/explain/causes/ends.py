"""Decide how an attempt ended, and which cause this end suggests.

`choosing` uses the suggested cause if no statement offers a better explanation. This module judges
exit statuses, signals, kernel counters, hangs, and the events that a Guard records while it closes;
`candidate_search` judges statements. There are three tables of rules: for an attempt without an
exit status, for status 0, and for a failure. In each table, the first rule that applies wins.

The certainties are estimates: the fewer other explanations a sign has, the higher the certainty.
They were not measured, because the cause can be inferred from the end alone in only a few of the
recorded failures.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from holdfast.core.events.event import Event
from holdfast.explain import observations
from holdfast.explain.causes.exit_signs import ExitSigns, collect_signs
from holdfast.explain.certainty import CERTAINTIES, Certainty, least_of
from holdfast.explain.evidence import Evidence
from holdfast.explain.exhibits import exhibits_of_end, exhibits_of_hang
from holdfast.explain.exit_status import (
    SIGNALS_FROM_OUTSIDE,
    is_signal_name,
    signal_name,
    status_text,
)
from holdfast.explain.signatures import all_signatures, ids
from holdfast.explain.verdict import Exhibit
from holdfast.recorder.run_files import LOST_FILE

_CAUSE_BY_SIGNAL: dict[int, str] = {
    signal.SIGKILL: ids.KILLED,
    signal.SIGTERM: ids.TERMINATED,
    signal.SIGINT: ids.INTERRUPTED,
    signal.SIGHUP: ids.HUNG_UP,
    signal.SIGSEGV: ids.SEGMENTATION_FAULT,
    signal.SIGABRT: ids.ABORTED,
    signal.SIGBUS: ids.BUS_ERROR,
}
# Signals that schedulers send to warn or end a job.
_SIGNALS_OF_SCHEDULERS = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGQUIT})
# A shell's exit codes for a command that it cannot execute (126) or cannot find (127).
_COMMAND_NOT_EXECUTED = (126, 127)
# Exceptions that scripts and launchers raise when they are asked to stop.
_EXCEPTIONS_OF_A_STOP = frozenset(
    {
        "CalledProcessError",
        "ChildFailedError",
        "KeyboardInterrupt",
        "ProcessExitedException",
        "SIGTERMException",
        "SignalException",
        "SystemExit",
    }
)
# When the supervisor is killed, its pipes close before the sentinel notices. A failure of the
# script up to this many seconds before that, for example because it can no longer print, is assumed
# to be caused by the loss of the supervisor.
_SENTINEL_DELAY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended, and the cause that this end suggests."""

    # The id of the signature that the end suggests as the cause, or None.
    cause: str | None = None
    # How certain this cause is if no statement explains the end better.
    certainty: Certainty = "a guess"
    # The decisive exit status: the status of the command or of the rank that failed first. None if
    # neither is known.
    status: int | None = None
    # Whether the command ended with status 0 and none of its processes failed.
    well: bool = False
    # How the attempt ended, as a clause for the summary.
    why: str = ""
    # The evidence that shows how the attempt ended.
    exhibits: tuple[Exhibit, ...] = ()
    # The hang that led the supervisor to end the attempt, or None.
    hang: Event | None = None
    # The Unix time at which the user or a Guard's script requested a stop, or at which another host
    # or the supervisor ended. None if there was no such event.
    stop_requested_at: float | None = None
    # The rank that failed first, according to the supervisor or a launcher. None if unknown.
    first_rank: int | None = None

    @property
    def signal(self) -> int | None:
        """Return the number of the signal that ended the attempt, or None if no signal did."""
        if self.status is None or self.status >= 0:
            return None
        return -self.status


_EndRule: TypeAlias = Callable[[ExitSigns], AttemptEnd | None]


def find_end(evidence: Evidence) -> AttemptEnd:
    """Return how an attempt ended and the cause that this end suggests."""
    signs = collect_signs(evidence)
    if signs.status is None:
        end = _first_end(_RULES_WITHOUT_STATUS, signs)
    elif signs.status == 0 and signs.hang is None:
        end = replace(_first_end(_RULES_AFTER_SUCCESS, signs), status=0)
    else:
        end = _first_end(_RULES_AFTER_FAILURE, signs)
        end = replace(end, status=signs.status, hang=signs.hang, first_rank=signs.first_rank)
    if end.cause == ids.ENDED_WELL:
        end = _unless_result_is_lost(end, evidence)
    exhibits = exhibits_of_end(evidence, signs.command, signs.first_failure)
    return replace(end, exhibits=(*end.exhibits, *exhibits))


def _first_end(rules: Iterable[_EndRule], signs: ExitSigns) -> AttemptEnd:
    """Return the result of the first rule that applies, or an empty `AttemptEnd` if none does."""
    for rule in rules:
        end = rule(signs)
        if end is not None:
            return end
    return AttemptEnd()


# --- Without an exit status -----------------------------------------------------------------------


def _still_running(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if a process of the run is still running."""
    pids = signs.evidence.living_pids
    if not pids:
        return None
    alive = ", ".join(f"process {pid}" for pid in pids)
    return AttemptEnd(
        cause=ids.STILL_RUNNING,
        certainty="certain",
        why="it is still running",
        exhibits=(Exhibit(text=f"alive: {alive}", source="/proc"),),
    )


def _supervisor_was_killed(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if the sentinel noticed that the supervisor had been killed."""
    loss = signs.evidence.supervisor_loss
    if loss is None:
        return None
    words = f"processes still running when the supervisor was killed: {loss.killed_processes}"
    requested_at = None
    if loss.unix_seconds is not None:
        requested_at = loss.unix_seconds - _SENTINEL_DELAY_SECONDS
    return AttemptEnd(
        cause=ids.SUPERVISOR_LOST,
        certainty="certain",
        why="the supervisor was killed",
        stop_requested_at=requested_at,
        exhibits=(Exhibit(text=words, source=LOST_FILE),),
    )


def _guard_left_its_loop(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` without a cause if a Guard closed because its loop was left early."""
    closing = signs.evidence.guard_closing
    if closing is None or closing.how != "left":
        return None
    why = (
        "the script left the loop over batches early, by `break` or because of an error outside the"
        " Guard"
    )
    return AttemptEnd(why=why, exhibits=(Exhibit(text=why, source="guard"),))


def _guard_closed(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if a Guard closed after it finished or was asked to stop."""
    closing = signs.evidence.guard_closing
    if closing is None:
        return None
    cause = ids.ENDED_WELL
    why = "a Guard finished and closed"
    if closing.how == "stopped":
        why = f"a Guard saved and stopped on request ({closing.reason or 'not recorded'})"
        # A stop that the script itself requests is a normal end.
        if not closing.reason or observations.source_of_reason(closing.reason):
            cause = ids.STOPPED
    exhibit = Exhibit(text="the newest events show that a Guard closed", source="guard")
    return AttemptEnd(cause=cause, certainty="likely", why=why, exhibits=(exhibit,))


def _signal_before_the_end(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if a signal asked a Guard to stop, and nothing was recorded after it.

    A second signal, such as another Ctrl-C, has then ended the process at once.
    """
    event = observations.unanswered_signal(signs.evidence.events)
    if event is None:
        return None
    name = str(event.data.get("signal"))
    if not is_signal_name(name):
        # The recording is damaged.
        return None
    return AttemptEnd(
        cause=_CAUSE_BY_SIGNAL.get(signal.Signals[name], ids.TERMINATED),
        certainty="likely",
        why=f"{name} asked its Guard to stop, and the process ended before the Guard could do so",
        stop_requested_at=event.unix_seconds,
        exhibits=(
            Exhibit(text=f"{name} received", source="guard", unix_seconds=event.unix_seconds),
        ),
    )


def _output_says_done(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if the last lines of the output say that training is done."""
    if not signs.evidence.output_says_done:
        return None
    words = "its last lines say that training is done"
    return AttemptEnd(
        cause=ids.ENDED_WELL,
        certainty="likely",
        why=words,
        exhibits=(Exhibit(text=words, source=signs.evidence.source),),
    )


_RULES_WITHOUT_STATUS: tuple[_EndRule, ...] = (
    _still_running,
    _supervisor_was_killed,
    _guard_left_its_loop,
    _guard_closed,
    _signal_before_the_end,
    _output_says_done,
)


# --- After status 0 -------------------------------------------------------------------------------


def _stopped_by_guard(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if a Guard stopped on request and the status is 0."""
    request = observations.stop_request(signs.evidence.events)
    if request is None:
        return None
    end = replace(_end_of_stop(request, status=0), well=True)
    user_sent_a_signal = signs.evidence.stop_signal is not None
    if user_sent_a_signal or observations.source_of_stop(request) is not None:
        return end
    # A stop that the script itself requests is a normal end.
    return replace(end, cause=ids.ENDED_WELL, stop_requested_at=None)


def _stopped_by_user_with_status_0(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if the user sent a signal and the command then ended with status 0."""
    number = signs.evidence.stop_signal
    if number is None:
        return None
    return AttemptEnd(
        cause=_CAUSE_BY_SIGNAL.get(number, ids.TERMINATED),
        certainty="likely",
        why=f"it ended with status 0 after the user sent {signal_name(number)}",
        well=True,
    )


def _hidden_failure(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if a training process died, but its shell or parent had status 0.

    The returned `AttemptEnd` is empty, so that the cause is chosen from the statements.
    """
    for statement in signs.evidence.statements:
        if statement.fatal and statement.pid is not None:
            return AttemptEnd()
    return None


def _ended_well(_: ExitSigns) -> AttemptEnd | None:
    """Return "ended well", because nothing contradicts the exit status."""
    return AttemptEnd(
        cause=ids.ENDED_WELL, certainty="certain", why="it ended with status 0", well=True
    )


_RULES_AFTER_SUCCESS: tuple[_EndRule, ...] = (
    _stopped_by_guard,
    _stopped_by_user_with_status_0,
    _hidden_failure,
    _ended_well,
)


def _unless_result_is_lost(end: AttemptEnd, evidence: Evidence) -> AttemptEnd:
    """Return a failure in place of a good end if the result was not saved or training diverged."""
    if observations.unsaved_steps(evidence) is not None:
        return replace(end, cause=ids.NOT_SAVED)
    divergence = evidence.divergence
    if divergence is None or not divergence.exploded:
        return end
    # Losses in recorded steps are more reliable than printed ones.
    limit: Certainty = "likely" if divergence.log else "certain"
    return replace(
        end,
        cause=ids.TRAINING_DIVERGED,
        certainty=least_of([end.certainty, limit]),
        why=f"{end.why}, but {divergence.clause()}",
    )


# --- After a failure ------------------------------------------------------------------------------


def _hung(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if the supervisor ended the attempt because there was no progress."""
    hang = signs.hang
    if hang is None:
        return None
    cause = hang.data.get("signature")
    if not isinstance(cause, str) or cause not in all_signatures():
        cause = ids.STUCK
    why = hang.data.get("sentence")
    if not isinstance(why, str):
        why = f"no progress in phase {hang.data.get('phase')}"
    return AttemptEnd(
        cause=cause,
        certainty=_certainty_of_hang(hang),
        why=why,
        exhibits=tuple(exhibits_of_hang(hang)),
        stop_requested_at=signs.stop_requested_at,
    )


def _certainty_of_hang(hang: Event) -> Certainty:
    """Return how certain the watchdog was; "a guess" if the recording is damaged."""
    recorded = hang.data.get("certainty")
    for certainty in CERTAINTIES:
        if certainty == recorded:
            return certainty
    return "a guess"


def _ended_by_another_host(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if another host ended first and the supervisor received no signal."""
    events = signs.evidence.events
    if any(event.kind == "signal" for event in events):
        return None
    for event in events:
        if event.kind == "ended_elsewhere":
            return AttemptEnd(
                cause=ids.ELSEWHERE,
                certainty="likely",
                why=f"another host ended the attempt ({event.data.get('why')})",
                stop_requested_at=event.unix_seconds,
            )
    return None


def _stopped_on_request(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if a Guard stopped on request and nothing failed after the request.

    A nonzero exit code of the script or its launcher does not count as a failure here.
    """
    evidence = signs.evidence
    request = observations.stop_request(evidence.events)
    if request is None or not observations.closed_after(evidence.events, request):
        return None
    if _crashed(signs) or _failed_after(evidence, request.unix_seconds):
        return None
    return _end_of_stop(request, status=signs.status or 0)


def _could_not_save(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if the exit code says that a Guard could not save its state."""
    if signs.status != os.EX_IOERR or observations.unsaved_steps(signs.evidence) is None:
        return None
    return AttemptEnd(
        cause=ids.NOT_SAVED,
        certainty="certain",
        why=f"it ended with status {signs.status} because its Guard could not save",
        stop_requested_at=signs.stop_requested_at,
    )


def _stopped_by_user(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if the user sent a signal.

    The signal is the cause, whatever the exit status is.
    """
    number = signs.evidence.stop_signal
    if number is None:
        return None
    status = signs.status or 0
    how = f"ended with {status_text(status)}"
    if status == -number:
        how = "was terminated by this signal"
    return AttemptEnd(
        cause=_CAUSE_BY_SIGNAL.get(number, ids.TERMINATED),
        certainty="certain",
        why=f"the user sent {signal_name(number)}, and the command {how}",
        stop_requested_at=signs.stop_requested_at,
    )


def _exit_code(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if the command ended with an exit code.

    The code reveals the cause only if the command was never started.
    """
    status = signs.status
    if status is None or status < 0:
        return None
    why = f"it ended with status {status}"
    if status in _COMMAND_NOT_EXECUTED and signs.evidence.phase is None:
        return AttemptEnd(cause=ids.NEVER_STARTED, certainty="likely", why=why)
    return AttemptEnd(cause=ids.STATUS_ONLY, certainty="a guess", why=why)


def _killed(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if SIGKILL ended the process.

    The signal was sent by a person, a scheduler or, if memory ran out, the kernel.
    """
    if signs.status != -signal.SIGKILL:
        return None
    why = _which_signal_ended_it(signs)
    if signs.kernel_kills:
        count = f"the kernel's out-of-memory kill counter rose by {signs.kernel_kills}"
        return AttemptEnd(
            cause=ids.OUT_OF_MEMORY_KILL, certainty="certain", why=f"{why}, and {count}"
        )
    if signs.kernel_kills == 0:
        return AttemptEnd(cause=ids.KILLED, certainty="likely", why=why)
    # The kernel's counter could not be read.
    if observations.host_memory_was_running_out(signs.evidence):
        why += " while memory was running out"
        return AttemptEnd(cause=ids.KILLED_UNCOUNTED, certainty="likely", why=why)
    return AttemptEnd(cause=ids.KILLED, certainty="a guess", why=why)


def _ended_by_a_signal(signs: ExitSigns) -> AttemptEnd | None:
    """Return an `AttemptEnd` if a signal other than SIGKILL ended the process."""
    if signs.status is None or signs.status >= 0:
        return None
    cause = _CAUSE_BY_SIGNAL.get(-signs.status, ids.OTHER_SIGNAL)
    certainty: Certainty = "likely"
    if -signs.status not in SIGNALS_FROM_OUTSIDE:
        # The process itself caused this signal, and the signal does not say how.
        certainty = least_of([certainty, all_signatures()[cause].certainty])
    return AttemptEnd(cause=cause, certainty=certainty, why=_which_signal_ended_it(signs))


_RULES_AFTER_FAILURE: tuple[_EndRule, ...] = (
    _hung,
    _ended_by_another_host,
    _stopped_on_request,
    _could_not_save,
    _stopped_by_user,
    _exit_code,
    _killed,
    _ended_by_a_signal,
)


def _which_signal_ended_it(signs: ExitSigns) -> str:
    """Return a clause that names the signal that ended a process."""
    status = signs.status or 0
    name = signal_name(-status) or status_text(status)
    command = signs.command
    if command is not None and observations.was_stopped_by_holdfast(command, status):
        return f"holdfast stopped it with {name}"
    who = "it" if signs.first_rank is None else f"rank {signs.first_rank}"
    return f"{who} was terminated by {name}"


def _end_of_stop(request: Event, *, status: int) -> AttemptEnd:
    """Return the `AttemptEnd` of an attempt that a Guard stopped on request.

    Args:
        request: The event that recorded the request.
        status: The decisive exit status, or 0 if unknown.
    """
    reason = str(request.data.get("reason", "not recorded"))
    why = f"a Guard saved and stopped on request ({reason})"
    if status:
        why += f", and the command ended with {status_text(status)}"
    exhibit = Exhibit(
        text=f"stop requested: {reason}", source="guard", unix_seconds=request.unix_seconds
    )
    return AttemptEnd(
        cause=ids.STOPPED,
        certainty="certain",
        why=why,
        stop_requested_at=request.unix_seconds,
        exhibits=(exhibit,),
    )


def _crashed(signs: ExitSigns) -> bool:
    """Return whether the process was ended by a signal that is not a request to stop.

    Such a signal is caused by the process itself, or sent by the kernel because memory ran out.
    """
    status = signs.status
    if status is None or status >= 0:
        return False
    if status == -signal.SIGKILL and signs.kernel_kills:
        return True
    return -status not in SIGNALS_FROM_OUTSIDE | _SIGNALS_OF_SCHEDULERS


def _failed_after(evidence: Evidence, unix_seconds: float) -> bool:
    """Return whether an exception ended a process after a given Unix time.

    Exceptions that scripts and launchers raise when they are asked to stop are ignored. An
    exception without a recorded time is assumed to have been raised after the given time.
    """
    raised = [
        statement
        for statement in evidence.statements
        if statement.kind == "exception" and statement.fatal
    ]
    final = observations.final_traceback(evidence)
    if final is not None:
        raised.append(final)
    for statement in raised:
        is_late = statement.unix_seconds is None or statement.unix_seconds > unix_seconds
        if is_late and statement.exception not in _EXCEPTIONS_OF_A_STOP:
            return True
    return False
