"""Fast regular expressions that first check whether a text contains one of their required words.

Each error line is searched for hundreds of patterns, hardly any of which match. Checking for a
required word takes a hundredth of the time that a search for the pattern takes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

# The standard library's parser for regular expressions, which is not public.
_parser: Any = importlib.import_module("re._parser")

_NOTHING_KNOWN: frozenset[str] = frozenset()


class QuickPattern:
    """A regular expression, with words at least one of which a matching text must contain.

    Args:
        pattern: The regular expression.
        flags: The flags for `re.compile`. Case is ignored by default.

    Attributes:
        words: Words in lower case, of which every matching text contains at least one. Empty if no
            such words can be derived from the pattern.
    """

    def __init__(self, pattern: str, flags: int = re.IGNORECASE) -> None:
        self._pattern = re.compile(pattern, flags)
        self.words = _needed_words(_parser.parse(pattern))

    def search(self, text: str, lowered: str) -> re.Match[str] | None:
        """Return the first match in a text, or None if there is no match.

        Args:
            text: The text to search.
            lowered: The same text in lower case.
        """
        if self.words and not any(word in lowered for word in self.words):
            return None
        return self._pattern.search(text)


def _needed_words(parsed: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """Return a set of words of which every match of a parsed pattern contains at least one.

    A pattern is a sequence of parts, and every match of the pattern contains a match of each part.
    Therefore, each part yields its own group of required words, and the most selective group is
    returned.
    """
    groups: list[frozenset[str]] = []
    literal = ""
    for kind, value in parsed:
        name = str(kind)
        if name == "LITERAL":
            literal += chr(value).lower()
        elif name != "AT":  # An anchor matches no characters, so the literal continues after it.
            groups.append(frozenset({literal}))
            groups.append(_needed_words_of_part(name, value))
            literal = ""
    groups.append(frozenset({literal}))
    usable = [group for group in groups if group and "" not in group]
    return max(usable, key=_selectivity, default=_NOTHING_KNOWN)


def _needed_words_of_part(name: str, value: Any) -> frozenset[str]:
    """Return the required words of one part of a pattern.

    Args:
        name: The kind of the part, as named by the parser.
        value: The parsed content of the part.
    """
    if name == "SUBPATTERN":
        # The value is a tuple of the group's number, two sets of flags, and the parsed group.
        return _needed_words(value[3])
    if name == "MAX_REPEAT":
        # A part that may be repeated zero times requires no words.
        least, _, repeated = value
        return _needed_words(repeated) if least > 0 else _NOTHING_KNOWN
    if name == "BRANCH":
        branches = [_needed_words(branch) for branch in value[1]]
        return frozenset().union(*branches) if all(branches) else _NOTHING_KNOWN
    return _NOTHING_KNOWN


def _selectivity(words: frozenset[str]) -> tuple[int, int]:
    """Return a sort key that is larger for a more selective group of words.

    A group is more selective if its shortest word is longer or if it contains fewer words.
    """
    return min(len(word) for word in words), -len(words)
