"""Decide whether to restart a command after an attempt, and with what delay and changes.

`RULES` is an ordered table in which the first rule that returns a decision wins. The rules are pure
functions of the attempt, the attempts before it, and the budgets.

The supervisor carries out the decision; ``explain`` determines why the attempt failed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.explain.signatures.signature import Restart as RestartKind
from holdfast.explain.verdict import Verdict
from holdfast.supervise.launch.attempt import AttemptEnd

# An attempt that runs at least this long counts as progress and resets the restart delay. The
# kubelet also resets its back-off after 10 minutes without a crash.
LONG_ATTEMPT_SECONDS = 600.0
# Bounds the exponent: 2 ** 32 times any first delay is far above the maximum delay.
_MAX_DOUBLINGS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How many times a command is restarted, and with what delays.

    Args:
        max_restarts: Maximum number of restarts after failures. Same default as torch's
            ``LaunchConfig.max_restarts``.
        max_preemptions: Maximum number of restarts after preemptions. The default is enough for a
            spot instance that is preempted once an hour overnight.
        min_progress_steps: If a failure recurs within this many steps, the run has made no
            progress, because checkpoints are usually saved less often.
        first_delay_seconds: Delay before the first restart. It doubles with each restart. Same
            default as the kubelet's ``CrashLoopBackOff``.
        max_delay_seconds: Maximum delay. Same default as the kubelet.
    """

    max_restarts: int = 3
    max_preemptions: int = 10
    min_progress_steps: int = 10
    first_delay_seconds: float = 10.0
    max_delay_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """Facts about an attempt that has ended, as used by the rules.

    Args:
        cause: Id of the cause in its verdict.
        kind: The verdict's kind, which decides whether a restart can help.
        at_step: Step at which the attempt failed, in the script's own count; None if unknown.
        steps: Number of steps that the attempt completed; None if unknown.
        seconds: How long the attempt ran.
    """

    cause: str
    kind: RestartKind
    at_step: int | None = None
    steps: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """The attempt that has just ended, which is the input of the rules.

    Args:
        verdict: Why the attempt ended.
        end: How the attempt ended.
        history: All attempts of this run, including this one, newest last.
        budgets: Limits on restarts.
        environment: The command's environment.
        stop_reason: Why the training script stopped, if a signal or `holdfast stop` asked it to and
            it has recorded that; otherwise None.
        follows_other_host: Whether the attempt ended only because it had failed on another host.
    """

    verdict: Verdict
    end: AttemptEnd
    history: Sequence[PastAttempt]
    budgets: Budgets
    environment: Mapping[str, str]
    stop_reason: str | None = None
    follows_other_host: bool = False

    @property
    def preemptions(self) -> list[PastAttempt]:
        """Return the attempts that were preempted and can be resumed."""
        return [attempt for attempt in self.history if attempt.kind == "preempted"]

    @property
    def failures(self) -> list[PastAttempt]:
        """Return the attempts that failed."""
        return [attempt for attempt in self.history if attempt.kind != "preempted"]

    @property
    def changes(self) -> dict[str, str]:
        """Return the environment variables that the verdict would change."""
        return effective_changes(self.environment, dict(self.verdict.changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain:
    """Restart the command.

    Args:
        cause: Id of the cause of the failed attempt.
        why: The reason, as a clause without a final period.
        delay_seconds: How long to wait before the restart.
        changes: Environment variables to set for all further attempts.
    """

    cause: str
    why: str
    delay_seconds: float = 0.0
    changes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """Do not restart the command; `why` is the reason, as a clause without a final period."""

    why: str


RestartDecision: TypeAlias = StartAgain | EndRun
Rule: TypeAlias = Callable[[EndedAttempt], RestartDecision | None]


def decide_restart(attempt: EndedAttempt) -> RestartDecision:
    """Return the decision of the first rule in `RULES` that makes one.

    If no rule does, the command is restarted after a delay.
    """
    for rule in RULES:
        decision = rule(attempt)
        if decision is not None:
            return decision
    return start_after_a_delay(attempt)


# --- the end of the attempt was intended ---


def user_or_scheduler_requested_the_end(attempt: EndedAttempt) -> RestartDecision | None:
    """If a signal requested the end of the run, do not restart."""
    if attempt.end.requested_by is None:
        return None
    return EndRun(
        why=f"{signal.Signals(attempt.end.requested_by).name} requested the end of the run"
    )


def training_was_asked_to_stop(attempt: EndedAttempt) -> RestartDecision | None:
    """If the training script stopped because of a signal or `holdfast stop`, do not restart.

    The training process itself may have received the request, so that the supervisor knows of it
    only from the recording. The exit code of such a process may be any number.
    """
    if attempt.stop_reason is None or attempt.end.was_ended_by_supervisor:
        return None
    return EndRun(why=f"the training script was asked to stop ({attempt.stop_reason})")


def command_succeeded(attempt: EndedAttempt) -> RestartDecision | None:
    """If the command exited with code 0, do not restart, unless it was ended after a hang."""
    if attempt.end.status != 0 or attempt.end.hang is not None:
        return None
    return EndRun(why="the command exited with code 0")


def only_the_exit_hung(attempt: EndedAttempt) -> RestartDecision | None:
    """If the process hung during interpreter exit, do not restart: training had finished."""
    hang = attempt.end.hang
    if hang is None or hang.remedy != "end":
        return None
    return EndRun(why="training had finished, and only the exit hung")


# --- another host failed ---


def other_host_decides(attempt: EndedAttempt) -> RestartDecision | None:
    """If another host failed, follow its decision as long as restarts are left."""
    if not attempt.follows_other_host:
        return None
    budgets = attempt.budgets
    if len(attempt.history) > budgets.max_restarts + budgets.max_preemptions:
        return EndRun(why="no restarts are left")
    return StartAgain(
        cause=attempt.verdict.cause,
        why=attempt.end.failed_elsewhere or "another host has failed",
        delay_seconds=budgets.first_delay_seconds,
    )


# --- the attempt failed here ---


def verdict_is_a_good_end(attempt: EndedAttempt) -> RestartDecision | None:
    """If the recording shows a successful run, do not restart, whatever the exit code."""
    if attempt.verdict.family != "ended well":
        return None
    return EndRun(why="the command ended well")


def restart_cannot_help(attempt: EndedAttempt) -> RestartDecision | None:
    """Do not restart after a failure that would recur, such as an error in the script."""
    if attempt.verdict.restart != "stop":
        return None
    return EndRun(why="restarting would not help")


def preempted(attempt: EndedAttempt) -> RestartDecision | None:
    """Resume a preempted run, within a budget that covers only preemptions."""
    if attempt.verdict.restart != "preempted":
        return None
    budgets = attempt.budgets
    if len(attempt.preemptions) > budgets.max_preemptions:
        return EndRun(why=f"all {budgets.max_preemptions} restarts after preemptions are used up")
    return StartAgain(
        cause=attempt.verdict.cause,
        why="it was preempted and can resume",
        delay_seconds=restart_delay_seconds(attempt.preemptions, budgets),
    )


def nothing_left_to_change(attempt: EndedAttempt) -> RestartDecision | None:
    """Do not restart if only a changed setting would help, but no setting is left to change.

    An example is a run that has run out of memory.
    """
    if attempt.verdict.restart != "remedy" or attempt.changes:
        return None
    return EndRun(why="there is no other setting to change that would help")


def same_failure_again(attempt: EndedAttempt) -> RestartDecision | None:
    """Do not restart if the same failure recurred without progress, unless a setting is changed."""
    if attempt.changes:
        return None
    why = find_repetition(attempt.failures, attempt.budgets)
    return None if why is None else EndRun(why=why)


def restarts_used_up(attempt: EndedAttempt) -> RestartDecision | None:
    """Do not restart if the budget for failures is used up."""
    max_restarts = attempt.budgets.max_restarts
    if len(attempt.failures) <= max_restarts:
        return None
    if max_restarts == 0:
        return EndRun(why="no restarts are allowed")
    return EndRun(why=f"all {max_restarts} restarts are used up")


def start_with_changed_settings(attempt: EndedAttempt) -> RestartDecision | None:
    """Restart immediately if the verdict changes a setting, because waiting would not help."""
    changes = attempt.changes
    if not changes:
        return None
    settings = ", ".join(f"{name}={value}" for name, value in changes.items())
    return StartAgain(cause=attempt.verdict.cause, why=f"with {settings}", changes=changes)


def start_after_a_delay(attempt: EndedAttempt) -> StartAgain:
    """Restart after a delay, because the cause may be temporary."""
    return StartAgain(
        cause=attempt.verdict.cause,
        why="the cause may be temporary",
        delay_seconds=restart_delay_seconds(attempt.failures, attempt.budgets),
    )


# The first rule that returns a decision wins; if there is none, `start_after_a_delay` decides. The
# order matters: requests to stop override the verdict, and restarts that cannot help are refused
# before they count against a budget.
RULES: tuple[Rule, ...] = (
    user_or_scheduler_requested_the_end,
    training_was_asked_to_stop,
    command_succeeded,
    only_the_exit_hung,
    other_host_decides,
    verdict_is_a_good_end,
    restart_cannot_help,
    preempted,
    nothing_left_to_change,
    same_failure_again,
    restarts_used_up,
    start_with_changed_settings,
)


# --- computations that the rules use ---


def find_repetition(failures: Sequence[PastAttempt], budgets: Budgets) -> str | None:
    """Return why the newest failure counts as a repetition of the previous one, or None."""
    if len(failures) < 2:
        return None
    before, newest = failures[-2:]
    if newest.cause != before.cause:
        return None
    if before.at_step is not None and newest.at_step is not None:
        if newest.at_step == before.at_step:
            return f"the same failure occurred twice at step {newest.at_step}"
        if abs(newest.at_step - before.at_step) < budgets.min_progress_steps:
            return f"the same failure occurred twice within {budgets.min_progress_steps} steps"
    if newest.steps is not None and newest.steps < budgets.min_progress_steps:
        return f"the same failure recurred after {newest.steps} steps"
    if newest.steps is None and newest.seconds < LONG_ATTEMPT_SECONDS:
        return "the same failure recurred without visible progress in between"
    return None


def restart_delay_seconds(attempts: Sequence[PastAttempt], budgets: Budgets) -> float:
    """Return the delay before the next attempt, in seconds.

    The delay doubles with each attempt that ended early; an attempt that ran for a long time
    resets it.
    """
    in_a_row = 0
    for attempt in attempts:
        if attempt.seconds >= LONG_ATTEMPT_SECONDS:
            in_a_row = 0
        in_a_row += 1
    # The first of several consecutive delays is not doubled.
    doublings = min(in_a_row - 1, _MAX_DOUBLINGS)
    # A first delay above the maximum was configured on purpose, so it raises the maximum.
    longest = max(budgets.max_delay_seconds, budgets.first_delay_seconds)
    return min(longest, budgets.first_delay_seconds * 2.0**doublings)


def effective_changes(environment: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables in `changes` whose values would actually change.

    Settings of the CUDA allocator are merged: keys that `changes` does not name keep their values.
    """
    effective = {}
    for name, value in changes.items():
        new_value = value
        if name.endswith("ALLOC_CONF"):
            new_value = merge_allocator_settings(environment.get(name, ""), value)
        if environment.get(name) != new_value:
            effective[name] = new_value
    return effective


def merge_allocator_settings(present: str, wanted: str) -> str:
    """Merge two comma-separated lists of ``key:value``; entries of `wanted` override the others.

    A value may be a list in brackets, whose commas do not separate entries.
    """
    entries = {}
    for entry in re.split(r",(?![^\[]*\])", f"{present},{wanted}"):
        key, colon, value = entry.strip().partition(":")
        if key:
            entries[key] = f"{colon}{value}"
    return ",".join(f"{key}{value}" for key, value in entries.items())
