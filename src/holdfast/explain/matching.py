"""Which signatures fit a statement, and which of them fits best.

Does not: weigh statements against each other (see ``weighing``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.explain.evidence import Statement
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import all_signatures

# Characters that are searched: messages list keys of a state dict; no line of an error is so long.
_MOST_OF_A_MESSAGE = 20_000
_MOST_OF_A_LINE = 4_000


class Match(NamedTuple):
    """One signature that fits a statement; the smaller the order, the better it fits."""

    order: tuple[float, ...]
    signature: Signature


@dataclass(frozen=True, slots=True)
class _Compiled:
    signature: Signature
    patterns: tuple[re.Pattern[str], ...]
    frames: tuple[re.Pattern[str], ...]
    in_frames: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]

    def order(self, statement: Statement) -> tuple[float, ...] | None:
        """Return how well the signature fits, or None if it does not."""
        signature, patterns = self.signature, self.patterns
        named = 0
        if statement.kind == "exception":
            places = [f"{frame.file}:{frame.function}" for frame in statement.frames]
            if signature.exceptions and statement.exception not in (None, *signature.exceptions):
                return None
            if self.frames and not _any(self.frames, places):
                return None
            named = bool(signature.exceptions) + bool(self.frames)
            patterns += tuple(text for text, frame in self.in_frames if _any([frame], places))
        elif signature.only_exceptions:
            return None
        length = _matched(statement, patterns)
        if length is None:
            return None
        # One that names a class or frames knows more; then the longer text says more; at last the id, to be definite.
        return (signature.rank, -named, -length, int(signature.id[1:]))


@functools.cache
def _compiled() -> tuple[_Compiled, ...]:
    def of(patterns: Iterable[str]) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)

    return tuple(
        _Compiled(
            signature=each,
            patterns=of(each.patterns),
            frames=of(each.frames),
            in_frames=tuple((re.compile(text, re.IGNORECASE), re.compile(frame)) for text, frame in each.in_frames),
        )
        for each in all_signatures().values()
        if each.patterns or each.in_frames
    )


def match_all(statement: Statement) -> list[Match]:
    """Return every signature that fits a statement, the best first."""
    found = [(each.order(statement), each.signature) for each in _compiled()]
    matches = [Match(order, signature) for order, signature in found if order is not None]
    return sorted(matches, key=lambda match: match.order)


def _any(patterns: Iterable[re.Pattern[str]], places: Iterable[str]) -> bool:
    return any(pattern.search(place) for pattern in patterns for place in places)


def _matched(statement: Statement, patterns: tuple[re.Pattern[str], ...]) -> int | None:
    """Return how many characters the pattern that fits best covers, or None."""
    texts = [statement.text[: _MOST_OF_A_MESSAGE if statement.kind == "exception" else _MOST_OF_A_LINE]]
    if statement.exception is not None:
        texts.append(f"{statement.exception}: {texts[0]}" if texts[0] else statement.exception)
    for text in texts:
        found = [match.end() - match.start() for pattern in patterns if (match := pattern.search(text)) is not None]
        if found:
            return max(found)
    return None
