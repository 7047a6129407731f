"""What a function changes by running: a counter, a list that it appends to, a table that it fills, a lazy attribute.

Such a thing tells nothing of the features, and differs between a process that has run the function and one that has
not. It is found out where the first two items are computed: before, between and behind them the function is told.

- What both changed, changes whenever it runs. It is left out, and nothing else of what it lies in: of
  ``{"gain": 2, "seen": 7}`` the gain still counts, and of a list that grows, what was in it at the beginning.
- What only the first changed is as it is before the first run, or as it is after it. Any third value is another one:
  a rate that is None until the function chooses 400 is not one that somebody set to 800.

Does not compare (``keys``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from holdfast.data.features.telling import LEFT_OUT, SEPARATOR, Teller, short

OF_FUNCTION = "function: "
"""Begins the names of facts about the function."""


class Runs(NamedTuple):
    """What a function changes by running.

    Args:
        after: Facts that it changes, as they are after it has run; None for one that is gone. What changes at each
            run is left out of them.
        marks: What is left out, by path: ``LEFT_OUT``, or how many entries of a container are not.
    """

    after: dict[str, str | None]
    marks: dict[str, int]


class Origin(NamedTuple):
    """What features are made from.

    Args:
        key: Facts by name.
        runs: What their function changes by running; None if it changes nothing, or nobody knows.
    """

    key: dict[str, str]
    runs: Runs | None = None

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        """Return what `as_json` has given.

        Raises:
            KeyError: or TypeError, if it is not that.
        """
        runs = found.get("runs")
        return cls(found["key"], Runs(runs["after"], runs["marks"]) if runs else None)

    def as_json(self) -> dict[str, Any]:
        """Return it as what JSON knows."""
        return {"key": self.key} | ({"runs": self.runs._asdict()} if self.runs else {})


class Told(NamedTuple):
    """A function at one moment.

    Args:
        facts: By name.
        texts: Of all that it leads to, by path.
        references: Paths of what was told at another one before.
        lengths: Entries of the containers among them.
        whole: Whether every path is there.
    """

    facts: dict[str, str]
    texts: dict[str, str]
    references: set[str]
    lengths: dict[str, int]
    whole: bool


def tell(teller: Teller, fn: Any) -> Told:
    """Return what decides what a function does."""
    parts: dict[str, list[str]] = {}
    for name, text in teller.parts(fn):
        parts.setdefault(f"{OF_FUNCTION}{name}", []).append(text)  # a class and its base may have the same name
    facts = {name: short("; ".join(texts)) for name, texts in parts.items()}
    return Told(facts, teller.texts, teller.references, teller.lengths, teller.told_all)


class Watch:
    """Looks at a function before its first item and after the first two.

    Args:
        fn: Has not computed an item here since the build began.
    """

    def __init__(self, fn: Any) -> None:
        self._fn = fn
        self._told: list[Told] = []
        self._look()

    def _look(self) -> None:
        with contextlib.suppress(Exception):  # what it has made cannot be told: it is compared as it was before
            self._told.append(tell(Teller(), self._fn))

    def ran(self) -> Runs | None:
        """Return what is known now that it has computed one item more; None if it has changed nothing."""
        expected = len(self._told) + 1
        self._look()
        if not 2 <= len(self._told) == expected:
            return None
        first, last = self._told[0], self._told[-1]
        marks = _marks(*self._told) if len(self._told) > 2 else {}
        facts = tell(Teller(marks), self._fn).facts if marks else last.facts
        names = [*first.facts, *(name for name in last.facts if name not in first.facts)]
        after = {name: facts.get(name) for name in names if first.facts.get(name) != last.facts.get(name)}
        return Runs(after, marks) if after or marks else None


def _marks(first: Told, between: Told, last: Told) -> dict[str, int]:
    """Return what has changed from the second moment to the last, as deep as it can be told.

    What was told elsewhere before has its text from there, with what is left out there, and needs no mark.
    """
    if not (between.whole and last.whole):
        return {}
    old, new = between.texts, last.texts
    changed = {path for path in [*old, *new] if old.get(path) != new.get(path)}
    holders = {holder for path in changed | between.references | last.references for holder in _holders(path)}
    marks: dict[str, int] = {}
    for path in changed & new.keys():
        if path in old:
            if path not in holders:
                marks[path] = LEFT_OUT
            continue
        added = next((each for each in reversed(_holders(path)) if each not in old), path)
        holder = added.rpartition(SEPARATOR)[0]
        if holder in old and holder not in last.lengths and added not in between.references:
            marks[added] = LEFT_OUT
    for path in changed & last.lengths.keys():
        if last.lengths[path] > between.lengths.get(path, last.lengths[path]):
            marks[path] = first.lengths.get(path, 0)
    return dict(sorted(marks.items()))


def _holders(path: str) -> list[str]:
    """Return the paths that this one lies in, the nearest first."""
    found = []
    while path := path.rpartition(SEPARATOR)[0]:
        found.append(path)
    return found
