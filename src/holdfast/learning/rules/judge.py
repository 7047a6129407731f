"""Apply all rules to observations, and collect the findings of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from holdfast.learning.finding import Finding, in_order
from holdfast.learning.observations import Observations
from holdfast.learning.rules import (
    data,
    gradients,
    losses,
    models,
    nonfinite,
    progress,
    schedules,
    step_size,
)
from holdfast.learning.rules.registry import REGISTERED, LearningRule, Tier

# Importing these registers their rules.
MODULES = (
    nonfinite,
    models,
    gradients,
    schedules,
    step_size,
    losses,
    data,
    progress,
)


def learning_rules() -> Mapping[str, LearningRule]:
    """Return all rules by id, sorted by id."""
    return dict(sorted(REGISTERED.items()))


def judge(run: Observations, tier: Tier, ignore: Collection[str] = ()) -> list[Finding]:
    """Return the findings of all rules of a tier, except ignored rules."""
    return [
        finding
        for rule in learning_rules().values()
        if rule.tier == tier and rule.id not in ignore
        for finding in rule.check(run, rule)
    ]


# A finding is known by its rule and the place that it concerns.
_Key = tuple[str, str]


class Findings:
    """The findings of a run so far, and which of them have been reported.

    Args:
        ignore: Ids of rules that are not applied.
    """

    def __init__(self, ignore: Collection[str] = ()) -> None:
        self._ignore = ignore
        # A contract that has been violated once stays violated.
        self._contracts: dict[_Key, Finding] = {}
        # Only the newest findings of window rules count, because a slow start may have looked like
        # a fault.
        self._windows: list[Finding] = []
        # The findings that `take_fresh` has returned, here or in an earlier attempt.
        self._reported: set[_Key] = set()

    def judge(self, run: Observations, *, windows: bool) -> None:
        """Apply the contract rules to a run and, if `windows` is true, the window rules too."""
        for finding in judge(run, "contract", self._ignore):
            self._contracts.setdefault(_key(finding), finding)
        if windows:
            self._windows = judge(run, "window", self._ignore)

    def all(self) -> list[Finding]:
        """Return all findings, most important first."""
        return in_order([*self._contracts.values(), *self._windows])

    def reported(self) -> list[Finding]:
        """Return the findings, except those of rules that are reported only on request."""
        return [finding for finding in self.all() if not REGISTERED[finding.rule].on_request]

    def take_fresh(self) -> list[Finding]:
        """Return the findings that this method has not returned before."""
        fresh = [finding for finding in self.reported() if _key(finding) not in self._reported]
        self._reported.update(_key(finding) for finding in fresh)
        return fresh

    def reported_keys(self) -> list[list[str]]:
        """Return rule and place of every finding that `take_fresh` has returned, as plain data."""
        return sorted(list(key) for key in self._reported)

    def load_reported_keys(self, keys: Iterable[Iterable[str]]) -> None:
        """Treat findings that an earlier process has reported as already returned."""
        self._reported = {(rule, where) for rule, where in keys}


def _key(finding: Finding) -> _Key:
    return finding.rule, finding.where
