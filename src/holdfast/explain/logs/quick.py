"""Regular expressions that are only tried on texts with a word that they cannot do without.

Hundreds of patterns are sought in each line of an error, and nearly none fits: to look for a word
    takes a hundredth
of the time.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

# Of the standard library, which has no public name for it
_parser: Any = importlib.import_module("re._parser")


class QuickPattern:
    """A regular expression; by default upper and lower case are the same."""

    def __init__(self, pattern: str, flags: int = re.IGNORECASE) -> None:
        self._pattern = re.compile(pattern, flags)
        # Of which a text must have one, in lower case; none: unknown
        self.words = _needed(_parser.parse(pattern))

    def search(self, text: str, lowered: str) -> re.Match[str] | None:
        """Return the first match in a text, which is given in lower case too."""
        if self.words and not any(word in lowered for word in self.words):
            return None
        return self._pattern.search(text)


def _needed(sequence: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """Return words of which one is in each text that a parsed pattern matches.

    None: nothing is known.
    """
    groups: list[frozenset[str]] = []
    run = ""
    for kind, value in sequence:
        name = str(kind)
        if name == "LITERAL":
            run += chr(value).lower()
        elif name != "AT":  # a place consumes nothing
            groups, run = [*groups, frozenset({run})], ""
            if name == "SUBPATTERN":
                groups.append(_needed(value[3]))
            elif name == "MAX_REPEAT" and value[0] > 0:
                groups.append(_needed(value[2]))
            elif name == "BRANCH":
                branches = [_needed(each) for each in value[1]]
                groups.append(frozenset().union(*branches) if all(branches) else frozenset())
    groups.append(frozenset({run}))
    return max(
        (each for each in groups if each and "" not in each), key=_telling, default=frozenset()
    )


def _telling(words: frozenset[str]) -> tuple[int, int]:
    return min(map(len, words)), -len(words)
