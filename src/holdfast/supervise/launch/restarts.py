"""Decide whether a command is restarted after an attempt, when, and with which changes.

`RULES` is an ordered table; the first rule that has an answer wins. The rules are pure functions of
the attempt, the attempts before it, and the budgets.

Does not: wait, start anything, or judge why an attempt failed (``explain`` does).
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

# An attempt that ran this long counts as progress. The kubelet resets its back-off after 10 minutes
# without a crash.
LONG_ATTEMPT_SECONDS = 600.0
# 2.0 ** 32 times any first delay is far above the longest delay.
_MAX_DOUBLINGS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How often and how quickly a command is restarted.

    Args:
        max_restarts: Restarts of a run, not counting preemptions. The default is that of torch's
            ``LaunchConfig.max_restarts``.
        max_preemptions: Restarts after a preemption. The default covers a spot machine that is
            taken away every hour for a night.
        min_progress_steps: Fewer steps than this between two failures with the same cause do not
            count as progress, because no checkpoint preserves them.
        first_delay_seconds: Delay before the first restart; it doubles each time. The default is
            that of the kubelet's ``CrashLoopBackOff``.
        max_delay_seconds: Longest delay; the default is the kubelet's too.
    """

    max_restarts: int = 3
    max_preemptions: int = 10
    min_progress_steps: int = 10
    first_delay_seconds: float = 10.0
    max_delay_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """What the rules remember about an attempt that has ended.

    Args:
        cause: Id of the cause in its verdict.
        kind: The verdict's kind, which decides whether a restart can help.
        at_step: Step at which it failed, as the training script counts; None if unknown.
        steps: Number of steps made in this attempt; None if unknown.
        seconds: How long it ran.
    """

    cause: str
    kind: RestartKind
    at_step: int | None = None
    steps: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """The input of the rules.

    Args:
        verdict: Why the newest attempt ended.
        end: How it ended.
        history: All attempts of this run, newest last.
        budgets: How often the command may be restarted.
        environment: The command's environment.
        stop_signal: Name of the signal on which the training script stopped, according to its
            events; None if it recorded no such stop.
        follows_other_host: Whether the attempt ended only because it had failed on another host.
    """

    verdict: Verdict
    end: AttemptEnd
    history: Sequence[PastAttempt]
    budgets: Budgets
    environment: Mapping[str, str]
    stop_signal: str | None = None
    follows_other_host: bool = False

    @property
    def preemptions(self) -> list[PastAttempt]:
        """Return the attempts that were stopped from outside and can be resumed."""
        return [attempt for attempt in self.history if attempt.kind == "preempted"]

    @property
    def failures(self) -> list[PastAttempt]:
        """Return the attempts that failed."""
        return [attempt for attempt in self.history if attempt.kind != "preempted"]

    @property
    def changes(self) -> dict[str, str]:
        """Return the verdict's environment variables that would change anything."""
        return effective_changes(self.environment, dict(self.verdict.changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain:
    """Restart the command.

    Args:
        cause: Id of the cause of the attempt that failed.
        why: Reason, as a clause without a full stop.
        delay_seconds: How long to wait first.
        changes: Environment variables to set for all further attempts.
    """

    cause: str
    why: str
    delay_seconds: float = 0.0
    changes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """Do not restart the command; `why` is a clause without a full stop."""

    why: str


RestartDecision: TypeAlias = StartAgain | EndRun
Rule: TypeAlias = Callable[[EndedAttempt], RestartDecision | None]


def decide_restart(attempt: EndedAttempt) -> RestartDecision:
    """Return the answer of the first rule in `RULES` that has one, or `start_after_a_delay`."""
    for rule in RULES:
        decision = rule(attempt)
        if decision is not None:
            return decision
    return start_after_a_delay(attempt)


# --- the attempt was meant to end ---


def user_or_scheduler_requested_the_end(attempt: EndedAttempt) -> RestartDecision | None:
    """A signal that asked the supervisor to stop also forbids another attempt."""
    if attempt.end.requested_by is None:
        return None
    return EndRun(why=f"{signal.Signals(attempt.end.requested_by).name} asked the run to stop")


def training_stopped_on_a_signal(attempt: EndedAttempt) -> RestartDecision | None:
    """A training process that was signaled directly records it; its exit code may be anything."""
    if attempt.stop_signal is None or attempt.end.was_ended_by_supervisor:
        return None
    return EndRun(why=f"the training script stopped on {attempt.stop_signal}")


def command_succeeded(attempt: EndedAttempt) -> RestartDecision | None:
    """Exit code 0 means success, unless we ended the command because of a hang."""
    if attempt.end.status != 0 or attempt.end.hang is not None:
        return None
    return EndRun(why="the command exited with code 0")


def only_the_exit_hung(attempt: EndedAttempt) -> RestartDecision | None:
    """A process that hangs during interpreter exit has finished its work."""
    hang = attempt.end.hang
    if hang is None or hang.remedy != "end":
        return None
    return EndRun(why="training had finished, and only the exit hung")


# --- another host failed ---


def other_host_decides(attempt: EndedAttempt) -> RestartDecision | None:
    """The host that failed decides; this one follows as long as a budget is left."""
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
    """According to its recording the command ended well, whatever its exit code."""
    if attempt.verdict.family != "ended well":
        return None
    return EndRun(why="the command ended well")


def restart_cannot_help(attempt: EndedAttempt) -> RestartDecision | None:
    """Some causes, such as an error in the script, would recur every time."""
    if attempt.verdict.restart != "stop":
        return None
    return EndRun(why="restarting would not help")


def preempted(attempt: EndedAttempt) -> RestartDecision | None:
    """A run that was stopped from outside may resume; such restarts have a budget of their own."""
    if attempt.verdict.restart != "preempted":
        return None
    budgets = attempt.budgets
    if len(attempt.preemptions) > budgets.max_preemptions:
        return EndRun(why=f"all {budgets.max_preemptions} restarts after a preemption are used up")
    return StartAgain(
        cause=attempt.verdict.cause,
        why="it was stopped from outside and can resume",
        delay_seconds=restart_delay_seconds(attempt.preemptions, budgets),
    )


def nothing_left_to_change(attempt: EndedAttempt) -> RestartDecision | None:
    """Some causes, such as out of memory, go away only if a setting is changed."""
    if attempt.verdict.restart != "remedy" or attempt.changes:
        return None
    return EndRun(why="no setting is left to change that would help")


def same_failure_again(attempt: EndedAttempt) -> RestartDecision | None:
    """A failure that has recurred without progress will recur, unless a setting is changed."""
    if attempt.changes:
        return None
    why = find_repetition(attempt.failures, attempt.budgets)
    return None if why is None else EndRun(why=why)


def restarts_used_up(attempt: EndedAttempt) -> RestartDecision | None:
    """Failures have a budget; preemptions do not count against it."""
    max_restarts = attempt.budgets.max_restarts
    if len(attempt.failures) <= max_restarts:
        return None
    if max_restarts == 0:
        return EndRun(why="no restarts are allowed")
    return EndRun(why=f"all {max_restarts} restarts are used up")


def start_with_changed_settings(attempt: EndedAttempt) -> RestartDecision | None:
    """If a setting is changed, restart without delay, since waiting would not help."""
    changes = attempt.changes
    if not changes:
        return None
    settings = ", ".join(f"{name}={value}" for name, value in changes.items())
    return StartAgain(cause=attempt.verdict.cause, why=f"with {settings}", changes=changes)


def start_after_a_delay(attempt: EndedAttempt) -> StartAgain:
    """Restart because no rule speaks against it: the cause may be temporary."""
    return StartAgain(
        cause=attempt.verdict.cause,
        why="the cause may be temporary",
        delay_seconds=restart_delay_seconds(attempt.failures, attempt.budgets),
    )


# The first rule that has an answer wins; without one, `start_after_a_delay` decides. The order
# is the argument: requests come before verdicts, and restarts that cannot help are refused before
# they use up a budget.
RULES: tuple[Rule, ...] = (
    user_or_scheduler_requested_the_end,
    training_stopped_on_a_signal,
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


# --- what the rules compute ---


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
    """Return the delay before the next attempt: it doubles with every attempt since a long one."""
    in_a_row = 0
    for attempt in attempts:
        if attempt.seconds >= LONG_ATTEMPT_SECONDS:
            in_a_row = 0
        in_a_row += 1
    doublings = min(in_a_row - 1, _MAX_DOUBLINGS)
    # A first delay above the maximum was configured on purpose, so it is respected.
    longest = max(budgets.max_delay_seconds, budgets.first_delay_seconds)
    return min(longest, budgets.first_delay_seconds * 2.0**doublings)


def effective_changes(environment: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return only the variables whose value would change, with their new values.

    The allocator's settings are a list of ``key:value``; keys that `changes` does not name keep
    their values.
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
    """Merge two lists of ``key:value``; entries of `wanted` win.

    A value may itself be a list in brackets, whose commas are not separators here.
    """
    entries = {}
    for entry in re.split(r",(?![^\[]*\])", f"{present},{wanted}"):
        key, colon, value = entry.strip().partition(":")
        if key:
            entries[key] = f"{colon}{value}"
    return ",".join(f"{key}{value}" for key, value in entries.items())
