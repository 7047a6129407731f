"""Losses and norms of gradients that a training printed, for programs that nobody observed.

Does not: read values of an evaluation, which may be of an empty set, or say what they mean (see ``curves_seen``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from holdfast.explain.logs.lines import CleanLine

# Runs of characters are bounded: a line of nothing else would take time quadratic in its length.
_NUMBER = r"(?:nan|inf(?:inity)?|\d{1,30}(?:\.\d{0,30})?(?:e[-+]?\d{1,4})?|\.\d{1,30}(?:e[-+]?\d{1,4})?)(?![\w.])"
_VALUE = rf"['\"]?\)?\s{{0,8}}(?:[:=|]|is)?\s{{0,8}}(?:tensor\()?([-+]?{_NUMBER})"
_LOSS = re.compile(rf"([\w/.-]{{0,60}}?loss(?:es)?){_VALUE}", re.IGNORECASE)
_NORM = re.compile(rf"([\w/.-]{{0,60}}?grad(?:ient)?[_ -]?norm){_VALUE}", re.IGNORECASE)
_PLAIN = re.compile(r"(?:train(?:ing)?[_/.-]?)?loss", re.IGNORECASE)
_EVALUATION = re.compile(
    r"(?:^|[^a-z])(?:val(?:id(?:at(?:ion|ing))?)?|eval(?:uat(?:ion|ing))?|test(?:ing)?|dev)(?![a-z])", re.IGNORECASE
)


def printed_losses(lines: Sequence[CleanLine]) -> tuple[tuple[int, float], ...]:
    """Return line and value of each training loss, oldest first.

    Where any is called plainly ``loss`` or ``train_loss``, only these count: others are parts of it.
    """
    found = list(_values(lines, _LOSS))
    plain = [each for each in found if _PLAIN.fullmatch(each[0])]
    return tuple((number, value) for _, number, value in plain or found)


def printed_norms(lines: Sequence[CleanLine]) -> tuple[tuple[int, float], ...]:
    """Return line and value of each norm of gradients, oldest first."""
    return tuple((number, value) for _, number, value in _values(lines, _NORM))


def _values(lines: Sequence[CleanLine], named: re.Pattern[str]) -> Iterator[tuple[str, int, float]]:
    for line in lines:
        until = 0
        for match in named.finditer(line.text):
            if not _EVALUATION.search(line.text, until, match.end(1)):
                yield match[1], line.number, float(match[2])
            until = match.end()
