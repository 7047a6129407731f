"""Which signatures fit a statement, and which of them fits best.

Does not: weigh statements against each other (see ``judging``).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from holdfast.explain.evidence import Statement
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import all_signatures

# Characters that are searched: messages list keys of a state dict; no line of an error is so long.
_MOST_OF_A_MESSAGE = 20_000
_MOST_OF_A_LINE = 4_000
_WITHOUT_FRAMES = (
    5  # ranks that a signature loses whose frames cannot be looked at, since only the last line is known
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One signature that fits one statement.

    Args:
        signature: It.
        statement: Likewise.
        order: The smaller, the better it fits among those of the same statement.
    """

    signature: Signature
    statement: Statement
    order: tuple[float, ...]


@functools.cache
def _compiled() -> tuple[tuple[Signature, tuple[re.Pattern[str], ...], tuple[re.Pattern[str], ...]], ...]:
    return tuple(
        (
            signature,
            tuple(re.compile(pattern, re.IGNORECASE) for pattern in signature.patterns),
            tuple(re.compile(pattern, re.IGNORECASE) for pattern in signature.frames),
        )
        for signature in all_signatures().values()
        if signature.patterns or signature.in_frames
    )


@functools.cache
def _in_frames(signature_id: str) -> tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]:
    pairs = all_signatures()[signature_id].in_frames
    return tuple((re.compile(text, re.IGNORECASE), re.compile(frame)) for text, frame in pairs)


def match_all(statement: Statement) -> list[Match]:
    """Return every signature that fits a statement, the best first."""
    found = []
    for signature, patterns, frames in _compiled():
        order = _order(statement, signature, patterns, frames)
        if order is not None:
            found.append(Match(signature=signature, statement=statement, order=order))
    return sorted(found, key=lambda match: match.order)


def best_match(statement: Statement) -> Match | None:
    """Return the signature that fits a statement best."""
    found = match_all(statement)
    return found[0] if found else None


def _order(
    statement: Statement,
    signature: Signature,
    patterns: tuple[re.Pattern[str], ...],
    frames: tuple[re.Pattern[str], ...],
) -> tuple[float, ...] | None:
    exception = statement.kind == "exception"
    if exception:
        if signature.exceptions and statement.exception not in (None, *signature.exceptions):
            return None
    elif signature.only_exceptions:
        return None
    without = 0
    if frames and exception:
        places = [f"{frame.file}:{frame.function}" for frame in statement.frames]
        if not places:
            without = _WITHOUT_FRAMES
        elif not any(pattern.search(place) for pattern in frames for place in places):
            return None
    if exception and signature.in_frames:
        places = [f"{frame.file}:{frame.function}" for frame in statement.frames]
        patterns += tuple(text for text, frame in _in_frames(signature.id) if any(map(frame.search, places)))
    length = _matched(statement, patterns)
    if length is None:
        return None
    # One that names a class or frames knows more; then the longer text says more; at last the id, to be definite.
    named = (bool(signature.exceptions) and exception) + (bool(frames) and exception and not without)
    return (signature.rank + without, -named, -length, int(signature.id[1:]))


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
