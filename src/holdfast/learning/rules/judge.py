"""Apply all rules to observations, and collect the findings of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from holdfast.learning.finding import Finding, in_order
from holdfast.learning.observations import Observations
from holdfast.learning.rules import (
    data,
    gradients,
    losses,
    modes,
    nonfinite,
    parameters,
    progress,
    schedules,
    step_size,
)
from holdfast.learning.rules.registry import REGISTERED, Rule, Tier

# Importing these registers their rules.
MODULES = (
    nonfinite,
    parameters,
    gradients,
    schedules,
    step_size,
    losses,
    modes,
    data,
    progress,
)


def learning_rules() -> Mapping[str, Rule]:
    """Return all rules by id, sorted by id."""
    return dict(sorted(REGISTERED.items()))


def judge(run: Observations, tier: Tier, ignore: Collection[str] = ()) -> list[Finding]:
    """Return the findings of all rules of a tier, except ignored rules."""
    return [
        finding
        for rule in learning_rules().values()
        if rule.tier == tier and rule.id not in ignore
        for finding in rule.find(run)
    ]


Place = tuple[str, str]


class Findings:
    """The findings of a run so far, and which of them have been reported."""

    def __init__(self) -> None:
        # A contract that has been violated once stays violated.
        self._contracts: dict[Place, Finding] = {}
        # For windows only the newest judgement counts: a slow start may have looked like a fault.
        self._windows: list[Finding] = []
        # Rule and place of the findings that `take_fresh` has returned, here or in an earlier
        # attempt.
        self._reported: set[Place] = set()

    def add_contracts(self, findings: Iterable[Finding]) -> None:
        """Add violated contracts."""
        for finding in findings:
            self._contracts.setdefault(_place(finding), finding)

    def replace_windows(self, findings: Iterable[Finding]) -> None:
        """Replace the findings of the previous window."""
        self._windows = list(findings)

    def all(self) -> list[Finding]:
        """Return all findings, most important first."""
        return in_order([*self._contracts.values(), *self._windows])

    def reported(self) -> list[Finding]:
        """Return the findings, except those of rules that are reported only on request."""
        return [finding for finding in self.all() if not REGISTERED[finding.rule].on_request]

    def take_fresh(self) -> list[Finding]:
        """Return the findings that this method has not returned before."""
        fresh = [finding for finding in self.reported() if _place(finding) not in self._reported]
        self._reported.update(_place(finding) for finding in fresh)
        return fresh

    def reported_places(self) -> list[list[str]]:
        """Return rule and place of every finding that `take_fresh` has returned, as plain data."""
        return sorted(list(place) for place in self._reported)

    def load_reported_places(self, places: Iterable[Iterable[str]]) -> None:
        """Treat findings that an earlier process has reported as already returned."""
        self._reported = {(rule, where) for rule, where in places}


def _place(finding: Finding) -> Place:
    return finding.rule, finding.where
