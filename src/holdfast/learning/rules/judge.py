"""Facts are judged by all rules, and what they found in a run is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from holdfast.learning.facts import Facts
from holdfast.learning.finding import Finding, ordered
from holdfast.learning.rules import losses, optimizers, progress, setup, signals
from holdfast.learning.rules.registry import REGISTERED, LearningRule, Tier

MODULES = (setup, optimizers, losses, progress, signals)
"""Where rules are: importing a module registers its rules."""


def learning_rules() -> Mapping[str, LearningRule]:
    """Return every rule by its id, in the order of the ids."""
    return dict(sorted(REGISTERED.items()))


def judge(facts: Facts, tier: Tier, ignore: Collection[str] = ()) -> list[Finding]:
    """Judge facts by the rules of a tier, but for those that shall be silent."""
    rules = [
        rule for name, rule in learning_rules().items() if rule.tier == tier and name not in ignore
    ]
    return [finding for rule in rules for finding in rule.findings(facts)]


class Findings:
    """What was found in a run so far, and what of it was reported."""

    def __init__(self) -> None:
        self._contracts: dict[tuple[str, str], Finding] = {}
        self._windows: list[Finding] = []
        self._reported: set[tuple[str, str]] = set()
        self._fresh: list[Finding] = []

    def add(self, contracts: Iterable[Finding], windows: list[Finding] | None) -> None:
        """Add what was found by exact rules, and by statistical ones if they were judged.

        Contracts stay; of windows the last count, since a slow start may have been mistaken for a
        fault.
        """
        for found in contracts:
            self._contracts.setdefault((found.rule, found.where), found)
        self._windows = self._windows if windows is None else windows
        fresh = [found for found in self.all() if (found.rule, found.where) not in self._reported]
        self._reported.update((found.rule, found.where) for found in fresh)
        self._fresh += fresh

    def all(self) -> list[Finding]:
        """Return what was found, the most important first."""
        return ordered([*self._contracts.values(), *self._windows])

    def take_fresh(self) -> list[Finding]:
        """Return what was found since the last call and never returned before."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def reported(self) -> list[list[str]]:
        """Return the rules and places that were reported, as plain data."""
        return sorted(list(each) for each in self._reported)

    def load_reported(self, reported: Iterable[Iterable[str]]) -> None:
        """Continue from what an earlier process has reported."""
        self._reported = {(rule, where) for rule, where in reported}
