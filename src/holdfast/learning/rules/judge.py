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

# Importing these modules registers their rules.
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
    """Return all rules, keyed and sorted by id."""
    return dict(sorted(REGISTERED.items()))


def judge(run: Observations, tier: Tier, ignore: Collection[str] = ()) -> list[Finding]:
    """Apply all rules of a tier, except the ignored ones, and return their findings."""
    return [
        finding
        for rule in learning_rules().values()
        if rule.tier == tier and rule.id not in ignore
        for finding in rule.check(run, rule)
    ]


# A finding is identified by its `rule` and `where`.
_Key = tuple[str, str]


class Findings:
    """Collects the findings of a run, and remembers which of them were already reported.

    Args:
        ignore: Ids of rules to skip.
    """

    def __init__(self, ignore: Collection[str] = ()) -> None:
        self._ignore = ignore
        # Findings of contract rules. Once a contract has been violated, the finding is kept.
        self._contracts: dict[_Key, Finding] = {}
        # Only the most recent findings of window rules are kept, because earlier ones may have been
        # due to a slow start.
        self._windows: list[Finding] = []
        # The keys of the findings that `take_fresh` has returned in this or an earlier attempt.
        self._reported: set[_Key] = set()

    def judge(self, run: Observations, *, windows: bool) -> None:
        """Apply the contract rules to a run's observations, and the window rules if `windows`."""
        for finding in judge(run, "contract", self._ignore):
            self._contracts.setdefault(_key(finding), finding)
        if windows:
            self._windows = judge(run, "window", self._ignore)

    def all(self) -> list[Finding]:
        """Return all findings, most important first."""
        return in_order([*self._contracts.values(), *self._windows])

    def reported(self) -> list[Finding]:
        """Return all findings except those that are reported only on request."""
        return [finding for finding in self.all() if not REGISTERED[finding.rule].on_request]

    def take_fresh(self) -> list[Finding]:
        """Return the reported findings that no earlier call of this method has returned."""
        fresh = [finding for finding in self.reported() if _key(finding) not in self._reported]
        self._reported.update(_key(finding) for finding in fresh)
        return fresh

    def reported_keys(self) -> list[list[str]]:
        """Return the key of each finding that `take_fresh` has returned, as plain data."""
        return sorted(list(key) for key in self._reported)

    def load_reported_keys(self, keys: Iterable[Iterable[str]]) -> None:
        """Restore the result of `reported_keys`, so that these findings are not returned again."""
        self._reported = {(rule, where) for rule, where in keys}


def _key(finding: Finding) -> _Key:
    return finding.rule, finding.where
