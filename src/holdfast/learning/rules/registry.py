"""The rules about runs that do not learn: how they are registered, and how facts are judged by them.

A rule is a pure function from plain facts to findings. *Contracts* are exact and are judged during the first steps;
*windows* are statistical and are judged rarely, and at the end. What the facts are, key by key, stands with those who
collect them: ``run.observer.Observer.facts``. A missing key makes a rule silent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol

from holdfast.learning.finding import Finding, Kind, Severity, ordered

Facts = Mapping[str, Any]
Tier = Literal["contract", "window"]
_ROOMS = ("contracts_setup", "contracts_steps", "contracts_losses", "windows_progress", "windows_signals", "domains")


class Say(Protocol):
    """Makes a finding of the rule at hand; severity, kind and confidence are those of the rule unless given."""

    def __call__(self, what: str, *, fix: str, **fields: Any) -> Finding:
        """Return a finding."""


Check = Callable[[Facts, Say], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRule:
    """One rule.

    Args:
        id: Such as ``"H811"``.
        tier: When it is judged.
        check: Yields findings from facts.
    """

    id: str
    tier: Tier
    check: Callable[[Facts], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the rules said.

    Args:
        contracts: Exact findings; they stay true.
        windows: Statistical ones, true of the run as it is now.
    """

    contracts: list[Finding]
    windows: list[Finding]


class Findings:
    """What was found in a run so far, and what of it was told."""

    def __init__(self) -> None:
        self._contracts: dict[tuple[str, str], Finding] = {}
        self._windows: list[Finding] = []
        self._told: set[tuple[str, str]] = set()
        self._fresh: list[Finding] = []

    def add(self, judgement: Judgement, *, windows: bool) -> None:
        """Add a judgement: contracts stay, of windows the last counts, since a slow start may have been mistaken."""
        for found in judgement.contracts:
            self._contracts.setdefault((found.rule, found.where), found)
        if windows:
            self._windows = judgement.windows
        fresh = [found for found in self.all() if (found.rule, found.where) not in self._told]
        self._told.update((found.rule, found.where) for found in fresh)
        self._fresh += fresh

    def all(self) -> list[Finding]:
        """Return what was found, the most important first."""
        return ordered([*self._contracts.values(), *self._windows])

    def take_fresh(self) -> list[Finding]:
        """Return what was found since the last call and never told before."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def told(self) -> list[list[str]]:
        """Return the rules and places that were told, as plain data."""
        return sorted(list(each) for each in self._told)

    def already_told(self, told: Iterable[Iterable[str]]) -> None:
        """Take up what an earlier process has told."""
        self._told = {(rule, where) for rule, where in told}


_registered: dict[str, LearningRule] = {}


def checks(
    *, rule: str, tier: Tier, severity: Severity, kind: Kind, confidence: float
) -> Callable[[Check], Callable[[Facts], list[Finding]]]:
    """Register a function as the check of a rule; afterwards it takes only facts and returns a list.

    Args:
        rule: Id of the rule.
        tier: When it is judged.
        severity: Of its findings, unless a finding says otherwise.
        kind: The same.
        confidence: The same.
    """

    def register(check: Check) -> Callable[[Facts], list[Finding]]:
        def say(what: str, *, fix: str, **fields: Any) -> Finding:
            return Finding(
                **{"rule": rule, "severity": severity, "kind": kind, "confidence": confidence, **fields},
                what=what,
                fix=fix,
            )

        @functools.wraps(check)
        def judged(facts: Facts) -> list[Finding]:
            return list(check(facts, say))

        _registered[rule] = LearningRule(id=rule, tier=tier, check=judged)
        return judged

    return register


@functools.cache
def learning_rules() -> Mapping[str, LearningRule]:
    """Return every rule by its id."""
    for room in _ROOMS:
        import_module(f"holdfast.learning.rules.{room}")
    return dict(sorted(_registered.items()))


def judge(facts: Facts, *, ignore: Collection[str] = (), windows: bool = True) -> Judgement:
    """Judge facts by all rules.

    Args:
        facts: What was measured.
        ignore: Rules that shall be silent.
        windows: Whether to ask the statistical rules too.
    """
    found: dict[str, list[Finding]] = {"contract": [], "window": []}
    for rule in learning_rules().values():
        if rule.id not in ignore and (windows or rule.tier == "contract"):
            found[rule.tier] += rule.check(facts)
    return Judgement(contracts=found["contract"], windows=found["window"])


def each(facts: Facts, key: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield the named parts of the facts under a key, nothing if it is missing."""
    named: Mapping[str, Mapping[str, Any]] = facts.get(key, {})
    return named.items()
