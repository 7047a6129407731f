"""Extract the losses and gradient norms that a training run printed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# All patterns limit the number of digits. Otherwise, searching a long line of digits would take
# quadratic time.

# A printed NaN or infinity. Lightning's progress bar prints NaN as "nan.0".
_NOT_FINITE = r"(?:nan|inf(?:inity)?)(?:\.0)?"
_EXPONENT = r"(?:e[-+]?\d{1,4})?"
_VALUE_TEXT = (
    rf"(?:{_NOT_FINITE}"
    rf"|\d{{1,30}}(?:\.\d{{0,30}})?{_EXPONENT}"
    rf"|\.\d{{1,30}}{_EXPONENT})"
    r"(?![\w.])"
)
_VALUE = rf"['\"]?\)?\s{{0,8}}(?:[:=|]|is)?\s{{0,8}}(?:tensor\()?([-+]?{_VALUE_TEXT})"
_LOSS = re.compile(rf"([\w/.-]{{0,60}}?loss(?:es)?){_VALUE}", re.IGNORECASE)
_NORM = re.compile(rf"([\w/.-]{{0,60}}?grad(?:ient)?[_ -]?norm){_VALUE}", re.IGNORECASE)
_PLAIN_LOSS = re.compile(r"(?:train(?:ing)?[_/.-]?)?loss", re.IGNORECASE)
_EVALUATION = re.compile(
    r"(?:^|[^a-z])(?:val(?:id(?:at(?:ion|ing))?)?|eval(?:uat(?:ion|ing))?|test(?:ing)?|dev)(?![a-z])",
    re.IGNORECASE,
)


def names_an_evaluation(name: str) -> bool:
    """Return whether the name of a metric says that it was computed in an evaluation."""
    return _EVALUATION.search(name) is not None


class _PrintedValue(NamedTuple):
    name: str
    line_number: int
    value: float


def find_printed_losses(lines: Sequence[tuple[int, str]]) -> tuple[tuple[int, float], ...]:
    """Return the line number and value of each printed training loss, oldest first.

    If there are losses with a plain name such as ``loss`` or ``train_loss``, only these are
    returned, because other losses are probably components of the plain loss.

    Args:
        lines: The line number and the text of each line.
    """
    losses = list(_find_printed_values(lines, _LOSS, "loss"))
    plain = [loss for loss in losses if _PLAIN_LOSS.fullmatch(loss.name)]
    return tuple((loss.line_number, loss.value) for loss in plain or losses)


def find_printed_norms(lines: Sequence[tuple[int, str]]) -> tuple[tuple[int, float], ...]:
    """Return the line number and value of each printed gradient norm, oldest first.

    Args:
        lines: The line number and the text of each line.
    """
    return tuple(
        (norm.line_number, norm.value) for norm in _find_printed_values(lines, _NORM, "norm")
    )


def _find_printed_values(
    lines: Sequence[tuple[int, str]], pattern: re.Pattern[str], word: str
) -> Iterator[_PrintedValue]:
    """Yield the values that a pattern finds, except values that were computed in an evaluation.

    Args:
        lines: The line number and the text of each line.
        pattern: A pattern with two groups: the name of the value and the value.
        word: A word in lower case that every match contains. For speed, the pattern is not searched
            for in lines without this word.
    """
    for number, text in lines:
        if word not in text.lower():
            continue
        end_of_previous = 0
        for match in pattern.finditer(text):
            if not _EVALUATION.search(text, end_of_previous, match.end(1)):
                yield _PrintedValue(match[1], number, _as_float(match[2]))
            end_of_previous = match.end()


def _as_float(text: str) -> float:
    """Convert a printed number to a float, ignoring a ``.0`` after a non-finite value."""
    return float(re.sub(r"([nfy])\.0$", r"\1", text))
