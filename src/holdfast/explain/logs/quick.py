"""Regular expressions that are only tried on texts with a word that they need.

Hundreds of patterns are searched in each line of an error, and nearly none matches. To look for a
word takes a hundredth of the time.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

# The parser of the standard library, which has no public name.
_parser: Any = importlib.import_module("re._parser")

_NOTHING_KNOWN: frozenset[str] = frozenset()


class QuickPattern:
    """A regular expression that knows which words a text must have to match.

    Args:
        pattern: The expression.
        flags: Those of `re.compile`. By default upper and lower case are the same.

    Attributes:
        words: Words in lower case, of which each text that matches has one. Empty if no such words
            are known.
    """

    def __init__(self, pattern: str, flags: int = re.IGNORECASE) -> None:
        self._pattern = re.compile(pattern, flags)
        self.words = _needed_words(_parser.parse(pattern))

    def search(self, text: str, lowered: str) -> re.Match[str] | None:
        """Return the first match in a text, which is passed in lower case too."""
        if self.words and not any(word in lowered for word in self.words):
            return None
        return self._pattern.search(text)


def _needed_words(parsed: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """Return words of which one is in each text that a parsed pattern matches.

    A pattern is a sequence of parts, each of which a matching text must contain. So each part gives
    one group of words, and any of the groups is an answer; the most telling one is returned.
    """
    groups: list[frozenset[str]] = []
    literal = ""
    for kind, value in parsed:
        name = str(kind)
        if name == "LITERAL":
            literal += chr(value).lower()
        elif name != "AT":  # An anchor consumes nothing, so the literal goes on behind it.
            groups.append(frozenset({literal}))
            groups.append(_needed_words_of_part(name, value))
            literal = ""
    groups.append(frozenset({literal}))
    usable = [group for group in groups if group and "" not in group]
    return max(usable, key=_how_telling, default=_NOTHING_KNOWN)


def _needed_words_of_part(name: str, value: Any) -> frozenset[str]:
    """Return the same for one part of a pattern, given its kind and its value in the parser."""
    if name == "SUBPATTERN":
        return _needed_words(value[3])
    if name == "MAX_REPEAT":
        least, _, repeated = value
        return _needed_words(repeated) if least > 0 else _NOTHING_KNOWN
    if name == "BRANCH":
        branches = [_needed_words(branch) for branch in value[1]]
        return frozenset().union(*branches) if all(branches) else _NOTHING_KNOWN
    return _NOTHING_KNOWN


def _how_telling(words: frozenset[str]) -> tuple[int, int]:
    """Return a key that is larger for long words, and for few of them."""
    return min(len(word) for word in words), -len(words)
