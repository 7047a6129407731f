"""Decide the outcome of a trial.

A rule returns None if it does not apply. The order of the rules matters, because the first rule
that applies decides. The rules check whether the fault happened, then whether the run survived the
fault, and then whether the run is still the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from holdfast.chaos.comparison.differences import OLDER, TEXT, RunDifference
from holdfast.chaos.comparison.timeline import TrialComparison
from holdfast.chaos.fault_plans import Fault
from holdfast.chaos.injection.plan import Action
from holdfast.chaos.results import TrialResult
from holdfast.chaos.trials import Trial

# The maximum number of file names that a message lists.
MAX_NAMED_FILES = 3
# A longer line of output is truncated to this length.
MAX_LINE_CHARACTERS = 200
# Matches a line that reports an exception, such as "ValueError: no data".
_EXCEPTION_LINE = re.compile(r"\w(Error|Exception)\b: \S")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCase:
    """The facts about one trial.

    Args:
        fault: The fault that was planned.
        trial: The trial, with all of its attempts.
        comparison: The comparison of the trial with the undisturbed run.
        is_steady: Whether two undisturbed runs are the same. If they are not, differences in a
            trial mean nothing.
        damaged_unread_file: Whether the damaged file is one that no restart reads.
    """

    fault: Fault
    trial: Trial
    comparison: TrialComparison
    is_steady: bool
    damaged_unread_file: bool

    @property
    def steps_repeated(self) -> str:
        """Return text such as "3 steps repeated", or an empty string if the number is unknown."""
        return f"{self.comparison.steps_again} steps repeated" if self.is_steady else ""


@dataclass(frozen=True, slots=True)
class TrialJudgement:
    """The outcome of a trial, and the reason for this outcome in words."""

    result: TrialResult
    detail: str


Rule: TypeAlias = Callable[[TrialCase], TrialJudgement | None]


def judge(case: TrialCase) -> TrialJudgement:
    """Return the judgement of the first rule in `RULES` that applies, and name the damaged file."""
    answers = (rule(case) for rule in RULES)
    judgement = next(answer for answer in answers if answer is not None)
    damaged = case.trial.damaged
    if damaged is None:
        return judgement
    how = f"{damaged.name} was damaged"
    if case.fault.kind == "io":
        how = f"a read of {damaged.name} failed"
    return replace(judgement, detail=f"{judgement.detail} ({how})")


# --- did the fault happen? ----------------------------------------------------------------------


def moment_never_came(case: TrialCase) -> TrialJudgement | None:
    """Return `DID_NOT_OCCUR` if the first attempt did not reach the moment of the fault."""
    first = case.trial.attempts[0]
    if first.events("fault"):
        return None
    detail = "the run never reached the moment of the fault"
    if first.status != 0:
        detail += f"; the command ended with {describe_status(first.status)}"
    return TrialJudgement(TrialResult.DID_NOT_OCCUR, detail)


def no_checkpoint_to_damage(case: TrialCase) -> TrialJudgement | None:
    """Return `DID_NOT_OCCUR` if the script was killed before it had saved any checkpoint."""
    if case.fault.damage is None or case.trial.damaged is not None:
        return None
    return TrialJudgement(TrialResult.DID_NOT_OCCUR, "no checkpoint was found")


def command_restarted_training_itself(case: TrialCase) -> TrialJudgement | None:
    """Return `DID_NOT_OCCUR` if the command continued without the restart that the fault needs.

    A fault needs a restart if it damages a checkpoint between two attempts, or if it injects
    something into a restart.
    """
    needs_restart = case.fault.damage is not None or case.fault.restart_injections
    if not needs_restart or len(case.trial.attempts) > 1:
        return None
    return TrialJudgement(TrialResult.DID_NOT_OCCUR, "the command continued without a restart")


def nothing_could_be_injected(case: TrialCase) -> TrialJudgement | None:
    """Return `DID_NOT_OCCUR` if the planned moment came, but nothing could be disturbed."""
    # The reasons that the injectors recorded in the traces.
    obstacles = [
        event.facts["why"] for attempt in case.trial.attempts for event in attempt.events("missed")
    ]
    action = case.fault.injection.action
    if obstacles and action in (Action.CUT_CONNECTIONS, Action.PUT_NAN):
        return TrialJudgement(TrialResult.DID_NOT_OCCUR, obstacles[0])
    changes = case.trial.attempts[0].changes
    if action == Action.WATCH_CHANGES and len(changes) < (case.fault.injection.change_number or 0):
        detail = f"this time, the save changed files with only {len(changes)} system calls"
        return TrialJudgement(TrialResult.DID_NOT_OCCUR, detail)
    refused_calls = sum(attempt.refused_calls for attempt in case.trial.attempts)
    if case.fault.kind == "io" and refused_calls == 0:
        detail = obstacles[0] if obstacles else "no such read or write was observed"
        return TrialJudgement(TrialResult.DID_NOT_OCCUR, detail)
    return None


# --- did the run survive? -----------------------------------------------------------------------


def last_attempt_hung(case: TrialCase) -> TrialJudgement | None:
    """Return `HANGS` if the last attempt made no progress and was killed."""
    if not case.trial.last.hung:
        return None
    return TrialJudgement(
        TrialResult.HANGS, _describe_end(case.trial, "the command hung and was killed")
    )


def last_attempt_failed(case: TrialCase) -> TrialJudgement | None:
    """Return `DOES_NOT_SURVIVE` if the last attempt ended with an error."""
    status = case.trial.last.status
    if status == 0:
        return None
    detail = _describe_end(case.trial, f"the command ended with {describe_status(status)}")
    return TrialJudgement(TrialResult.DOES_NOT_SURVIVE, detail)


def earlier_attempt_hung(case: TrialCase) -> TrialJudgement | None:
    """Return `HANGS` if the run completed only because the campaign killed a hanging attempt."""
    if not any(attempt.hung for attempt in case.trial.attempts):
        return None
    return TrialJudgement(
        TrialResult.HANGS, f"the command hung and had to be killed; then {case.steps_repeated}"
    )


def ended_in_nan(case: TrialCase) -> TrialJudgement | None:
    """Return `ENDS_IN_NAN` if the weights or the loss of the last step are not finite."""
    if case.comparison.finite:
        return None
    detail = "the weights or the loss at the end are NaN or infinite"
    return TrialJudgement(TrialResult.ENDS_IN_NAN, detail)


# --- is it still the same run? ------------------------------------------------------------------


def changed_by_nan(case: TrialCase) -> TrialJudgement | None:
    """Return `SURVIVES` if an injected NaN changed the run.

    A NaN in the data is allowed to change the run, as long as the weights remain finite, which
    `ended_in_nan` has already checked.
    """
    if case.fault.kind != "nan":
        return None
    if all(difference.what == TEXT for difference in case.comparison.differences):
        return None
    detail = "the batch with the NaN changed the run; the weights at the end are finite"
    return TrialJudgement(TrialResult.SURVIVES, detail)


def became_another_training(case: TrialCase) -> TrialJudgement | None:
    """Return `ANOTHER_TRAINING` if a step or a saved entry differs from the undisturbed run."""
    for difference in _grave_differences(case):
        if difference.what != OLDER:
            return TrialJudgement(TrialResult.ANOTHER_TRAINING, str(difference))
    return None


def lost_saved_work(case: TrialCase) -> TrialJudgement | None:
    """Return `WORK_LOST` if a restart ignored the newest complete checkpoint."""
    if case.fault.damage is not None:
        # The newest checkpoint was damaged, so resuming from an older one is correct.
        return None
    for difference in _grave_differences(case):
        if difference.what == OLDER:
            return TrialJudgement(TrialResult.WORK_LOST, str(difference))
    return None


def damage_without_effect(case: TrialCase) -> TrialJudgement | None:
    """Return `DID_NOT_OCCUR` if the run is the same because no restart reads the damaged file."""
    if not case.damaged_unread_file:
        return None
    names = sorted({path.name for path in case.trial.read})
    detail = (
        "no restart reads a file with such a name; restarts read"
        f" {', '.join(names[:MAX_NAMED_FILES])}"
    )
    return TrialJudgement(TrialResult.DID_NOT_OCCUR, detail)


def survived(case: TrialCase) -> TrialJudgement:
    """Return `EXACT` if undisturbed runs are reproducible; otherwise `SURVIVES`.

    This rule is the last one, so the run has survived, and no difference that matters was found.
    """
    if not case.is_steady:
        return TrialJudgement(TrialResult.SURVIVES, "")
    texts = [
        difference.detail for difference in case.comparison.differences if difference.what == TEXT
    ]
    return TrialJudgement(TrialResult.EXACT, "; ".join([case.steps_repeated, *texts]))


# The last rule always returns a judgement.
RULES: tuple[Rule, ...] = (
    moment_never_came,
    no_checkpoint_to_damage,
    command_restarted_training_itself,
    nothing_could_be_injected,
    last_attempt_hung,
    last_attempt_failed,
    earlier_attempt_hung,
    ended_in_nan,
    changed_by_nan,
    became_another_training,
    lost_saved_work,
    damage_without_effect,
    survived,
)


def _grave_differences(case: TrialCase) -> list[RunDifference]:
    """Return the differences that matter: none if even two undisturbed runs differ."""
    if not case.is_steady:
        return []
    return [difference for difference in case.comparison.differences if difference.what != TEXT]


def _describe_end(trial: Trial, how: str) -> str:
    """Describe how the last attempt ended, and quote the line of its output that explains why.

    This is the last line that reports an exception, because a launcher may print more lines after
    it. If no line reports an exception, the last line is quoted.
    """
    lines = [line for line in trial.last.output.splitlines() if re.search(r"\w", line)]
    exceptions = [line for line in lines if _EXCEPTION_LINE.search(line)]
    reason = ""
    if lines:
        reason = (exceptions or lines)[-1].strip()[:MAX_LINE_CHARACTERS]
    return f"start {len(trial.attempts)}: {how}; {reason}".strip("; ")


def describe_status(status: int) -> str:
    """Return a phrase that describes an exit status, such as "signal 9" or "exit code 1".

    Args:
        status: The exit code, or the negative number of the signal that killed the process.
    """
    return f"signal {-status}" if status < 0 else f"exit code {status}"
