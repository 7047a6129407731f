"""The report of a campaign, with one result per fault.

Fields are named as in the output of ``holdfast chaos --json``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from holdfast.chaos.comparison.differences import RunDifference


class TrialResult(StrEnum):
    """The outcome of a fault; the values are those of ``--json``."""

    # The same run, bit for bit.
    EXACT = "exact"
    # It runs to its end. Whether it is still the same run cannot be determined: the fault changed
    # the data, or two undisturbed runs differ already.
    SURVIVES = "survives"
    ANOTHER_TRAINING = "another training"
    # Steps that had been saved are repeated.
    WORK_LOST = "work is lost"
    ENDS_IN_NAN = "ends in NaN"
    HANGS = "hangs"
    DOES_NOT_SURVIVE = "does not survive"
    # The moment of the fault never came.
    DID_NOT_OCCUR = "did not occur"
    # There was no time left, or the campaign was interrupted.
    NOT_TRIED = "not tried"


@dataclass(slots=True, kw_only=True)
class FaultResult:
    """The result of one trial.

    Args:
        kind: Kind of the fault, one of `fault_plans.KINDS`.
        fault: The fault in words.
        result: The outcome.
        detail: How, in words.
        attempts: Number of times the command was started.
        seconds: Time of all attempts.
        seconds_lost: Time in addition to that of the undisturbed run.
        left_processes: Number of processes that outlived the command.
        left_files: Files that the undisturbed run does not leave.
        comparison: The fields of `timeline.TrialComparison`; empty if nothing was compared.
        failed: The last line of an error in the observer, empty if there was none.
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
        """Return whether the training run does not survive the fault."""
        return self.result in (
            TrialResult.DOES_NOT_SURVIVE,
            TrialResult.HANGS,
            TrialResult.ENDS_IN_NAN,
        )

    @property
    def tried(self) -> bool:
        """Return whether the fault happened."""
        return self.result not in (TrialResult.DID_NOT_OCCUR, TrialResult.NOT_TRIED)


@dataclass(slots=True, kw_only=True)
class CampaignReport:
    """What a campaign has found.

    Args:
        command: The command.
        seed: Seed of the faults.
        steps: Steps of the undisturbed run.
        undisturbed_seconds: Times of the two undisturbed runs.
        unsteady: How the two undisturbed runs differ, if they do.
        remarks: What the user should know besides the results.
        rows: One result per fault, in the order in which they were tried.
        seconds: Time of the whole campaign.
        seconds_of_runs: Time in which the command itself ran.
        losses: Loss of each step of the undisturbed run, None for a step without a loss.
        interrupted: Whether the user ended the campaign early.
        versions: Versions of Python, torch and holdfast.
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
        """Return whether the run survives every fault and is still the same run after each.

        This requires that all requested faults that can occur were tried.
        """
        if self.interrupted or self.unsteady is not None:
            return False
        if any(row.result == TrialResult.NOT_TRIED for row in self.rows):
            return False
        tried = [row for row in self.rows if row.tried]
        return bool(tried) and all(row.passed for row in tried)
