"""The report of a campaign, which contains one result per fault.

The fields have the same names in the output of ``holdfast chaos --json``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from holdfast.chaos.comparison.differences import RunDifference


class TrialResult(StrEnum):
    """The possible outcomes of a trial, with their names in the output of ``--json``."""

    # The run survived, and is bit for bit the same as the undisturbed run.
    EXACT = "exact"
    # The run reached its end, but whether it is still the same run cannot be determined, because
    # the fault changed the data or even two undisturbed runs differ.
    SURVIVES = "survives"
    ANOTHER_TRAINING = "another training"
    # The run repeated steps although it had already saved a checkpoint after these steps.
    WORK_LOST = "work is lost"
    ENDS_IN_NAN = "ends in NaN"
    HANGS = "hangs"
    DOES_NOT_SURVIVE = "does not survive"
    # The run never reached the moment of the fault, or the fault had no effect.
    DID_NOT_OCCUR = "did not occur"
    # No time was left, or the campaign was interrupted.
    NOT_TRIED = "not tried"


@dataclass(slots=True, kw_only=True)
class FaultResult:
    """The result of one trial.

    Args:
        kind: The kind of fault, which is one of `fault_plans.KINDS`.
        fault: A description of the fault.
        result: The outcome of the trial.
        detail: The reason for the outcome, in words.
        attempts: The number of times that the command was started.
        seconds: The total duration of all attempts.
        seconds_lost: How much longer the attempts took than the undisturbed run.
        left_processes: The number of processes that were still running after the command had ended.
        left_files: The files that this trial left behind but the undisturbed run did not.
        comparison: The fields of `timeline.TrialComparison`; empty if nothing was compared.
        failed: The last line of an error message from the observer; empty if there was no error.
    """

    kind: str
    fault: str
    result: TrialResult = TrialResult.NOT_TRIED
    detail: str = "no time"
    attempts: int = 0
    seconds: float = 0.0
    seconds_lost: float = 0.0
    left_processes: int = 0
    left_files: list[str] = field(default_factory=list)
    comparison: dict[str, Any] = field(default_factory=dict)
    failed: str = ""

    @property
    def passed(self) -> bool:
        """Return whether the training run passed the trial."""
        return self.result in (TrialResult.EXACT, TrialResult.SURVIVES)

    @property
    def lost(self) -> bool:
        """Return whether the training run failed, hung or ended in NaN because of the fault."""
        return self.result in (
            TrialResult.DOES_NOT_SURVIVE,
            TrialResult.HANGS,
            TrialResult.ENDS_IN_NAN,
        )

    @property
    def tried(self) -> bool:
        """Return whether the fault happened, so that the outcome says something about the run."""
        return self.result not in (TrialResult.DID_NOT_OCCUR, TrialResult.NOT_TRIED)


@dataclass(slots=True, kw_only=True)
class CampaignReport:
    """The results of a campaign.

    Args:
        command: The command that was tested.
        seed: The seed from which the faults were drawn.
        steps: The number of steps of the undisturbed run.
        undisturbed_seconds: The durations of the two undisturbed runs.
        unsteady: The first difference between the two undisturbed runs, or None if there is none.
        remarks: Notes for the user that apply to the campaign as a whole.
        rows: One result per fault, in the order in which the faults were tried.
        seconds: The duration of the whole campaign.
        seconds_of_runs: How long the command itself ran, in total over all attempts.
        losses: The loss of each step of the undisturbed run; None for a step without a loss.
        interrupted: Whether the user ended the campaign early.
        versions: The versions of Python, torch and holdfast.
    """

    command: list[str]
    seed: int
    steps: int
    undisturbed_seconds: list[float]
    unsteady: RunDifference | None
    remarks: list[str]
    rows: list[FaultResult] = field(default_factory=list)
    seconds: float = 0.0
    seconds_of_runs: float = 0.0
    losses: list[float | None] = field(default_factory=list)
    interrupted: bool = False
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Return whether the run passed the trial of every fault that occurred.

        The result is False if the campaign did not try all requested faults, if none of them
        occurred, or if two undisturbed runs differ.
        """
        if self.interrupted or self.unsteady is not None:
            return False
        if any(row.result == TrialResult.NOT_TRIED for row in self.rows):
            return False
        tried = [row for row in self.rows if row.tried]
        return bool(tried) and all(row.passed for row in tried)
