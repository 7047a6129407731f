"""Find the signatures that match a statement, and sort them from best to worst match.

There are about two hundred signatures, each with many patterns, and a log has thousands of lines.
For speed, the search uses an index of words that the patterns require.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.explain.evidence import Frame, Statement, is_user_code
from holdfast.explain.logs.quick_pattern import QuickPattern
from holdfast.explain.signatures import all_signatures, kinds_of_unknown
from holdfast.explain.signatures.signature import Signature

# How many characters of a text are searched for patterns. The message of an exception can be long,
# for example if it lists all keys of a state dict. Error lines in logs are shorter.
_MAX_MESSAGE_CHARACTERS = 20_000
_MAX_LINE_CHARACTERS = 4_000
_MISSING_ATTRIBUTE = re.compile(r"\bhas no attribute '(\w+)'")


class SignatureMatch(NamedTuple):
    """A signature that matches a statement, with its sort key."""

    # The sort key from `_IndexedSignature.order`. The smallest key is the best match.
    order: tuple[float, ...]
    signature: Signature


class _Text(NamedTuple):
    """One form of a statement's text that is searched for patterns, also in lower case."""

    text: str
    lowered: str


def match_all(statement: Statement) -> list[SignatureMatch]:
    """Return all signatures that match a statement, with the best match first."""
    return _match(statement, _index_of_signatures())


def find_best_kind(statement: Statement) -> Signature | None:
    """Return the kind of unknown failure that matches a statement best, or None.

    The kind determines the class of an exception or a line that matches no signature.
    """
    matches = _match(statement, _index_of_kinds())
    return matches[0].signature if matches else None


@functools.cache
def _index_of_signatures() -> _Index:
    return _Index(all_signatures().values())


@functools.cache
def _index_of_kinds() -> _Index:
    return _Index(kinds_of_unknown())


def _match(statement: Statement, index: _Index) -> list[SignatureMatch]:
    """Return the signatures of an index that match a statement, with the best match first."""
    texts = _searched_texts(statement)
    places = _searched_places(statement)
    matches = []
    for candidate in index.possible_matches("\n".join(text.lowered for text in texts)):
        order = candidate.order(statement, texts, places)
        if order is not None:
            matches.append(SignatureMatch(order, candidate.signature))
    return sorted(matches, key=lambda match: match.order)


class _Index:
    """An index that finds signatures by words, at least one of which a matching text contains."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self._signatures = [
            _IndexedSignature.of(signature)
            for signature in signatures
            if signature.patterns or signature.in_frames
        ]
        self._positions_by_word: dict[str, list[int]] = collections.defaultdict(list)
        for position, signature in enumerate(self._signatures):
            for word in signature.necessary_words():
                self._positions_by_word[word].append(position)

    def possible_matches(self, lowered: str) -> list[_IndexedSignature]:
        """Return the signatures that can match a text.

        Args:
            lowered: The text in lower case.
        """
        positions: set[int] = set()
        for word, positions_of_word in self._positions_by_word.items():
            if word in lowered:
                positions.update(positions_of_word)
        return [self._signatures[position] for position in sorted(positions)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _IndexedSignature:
    """A signature with compiled patterns."""

    signature: Signature
    patterns: tuple[QuickPattern, ...]
    frames: tuple[re.Pattern[str], ...]
    # Pairs of a pattern for the text and a regular expression for frames. The pattern applies only
    # if a frame matches the expression.
    in_frames: tuple[tuple[QuickPattern, re.Pattern[str]], ...]

    @classmethod
    def of(cls, signature: Signature) -> _IndexedSignature:
        return cls(
            signature=signature,
            patterns=tuple(QuickPattern(pattern) for pattern in signature.patterns),
            frames=tuple(re.compile(frame, re.IGNORECASE) for frame in signature.frames),
            in_frames=tuple(
                (QuickPattern(pattern), re.compile(frame)) for pattern, frame in signature.in_frames
            ),
        )

    def necessary_words(self) -> frozenset[str]:
        """Return a set of words, at least one of which every matching text contains.

        If no such words are known, return ``{""}``, because every text contains the empty string.
        """
        patterns = [*self.patterns, *(pattern for pattern, _ in self.in_frames)]
        if not all(pattern.words for pattern in patterns):
            return frozenset({""})
        return frozenset().union(*(pattern.words for pattern in patterns))

    def order(
        self, statement: Statement, texts: Sequence[_Text], places: Sequence[str]
    ) -> tuple[float, ...] | None:
        """Return a sort key that says how well the signature matches, or None if it does not match.

        The best match has the smallest key. Signatures are compared by rank, where a smaller rank
        is better. If the ranks are equal, the signature with more conditions (exception class,
        frames) is better, then the signature whose pattern covers more of the text, then the
        signature with the smaller id.
        """
        if not self._may_match(statement, places):
            return None
        covered = _covered_characters(texts, self._patterns_for(statement, places))
        if covered is None:
            return None
        signature = self.signature
        conditions = 0
        if statement.kind == "exception":
            conditions = bool(signature.exceptions) + bool(self.frames)
        return (signature.rank, -conditions, -covered, int(signature.id[1:]))

    def _may_match(self, statement: Statement, places: Sequence[str]) -> bool:
        """Return whether the statement's kind, exception class and frames allow a match."""
        if statement.kind == "line":
            return not self.signature.only_exceptions
        classes = self.signature.exceptions
        if classes and statement.exception is not None and statement.exception not in classes:
            return False
        return not self.frames or _any_matches(self.frames, places)

    def _patterns_for(self, statement: Statement, places: Sequence[str]) -> list[QuickPattern]:
        """Return the patterns that apply to a statement, given its frames as searched places."""
        patterns = list(self.patterns)
        if statement.kind == "exception":
            for pattern, frame in self.in_frames:
                if _any_matches([frame], places):
                    patterns.append(pattern)
        return patterns


def _searched_texts(statement: Statement) -> list[_Text]:
    """Return the forms of a statement's text to be searched, with the most reliable one first."""
    limit = _MAX_MESSAGE_CHARACTERS if statement.kind == "exception" else _MAX_LINE_CHARACTERS
    message = statement.text[:limit]
    forms = [message]
    if statement.exception is not None:
        forms.append(f"{statement.exception}: {message}" if message else statement.exception)
    if "\n" in message:
        # Also search the message without its line breaks, which may have been added when the log
        # was copied and pasted.
        forms.append(" ".join(message.split()))
    elif statement.kind == "line" and statement.ends_output:
        # Patterns recognize the last line of a log by its line terminator.
        forms[0] += "\n"
    return [_Text(form, form.lower()) for form in forms]


def _searched_places(statement: Statement) -> list[str]:
    """Return each frame as ``file:function``, followed by the innermost frame with its markers."""
    places = [f"{frame.file}:{frame.function}" for frame in statement.frames]
    # If `__getattr__` raised the exception, the frame that accessed the attribute is its caller.
    accessing = [frame for frame in statement.frames if frame.function != "__getattr__"]
    if accessing:
        places.append(_innermost_place(accessing[-1], statement.text))
    return places


def _innermost_place(frame: Frame, message: str) -> str:
    """Return the innermost frame as text with the markers that `Signature.in_frames` describes.

    Args:
        frame: The innermost frame that is not in ``__getattr__``.
        message: The message of the exception, which may name a missing attribute.
    """
    place = f"innermost {frame.file}:{frame.function}"
    if is_user_code(frame):
        place += " own"
    missing = _MISSING_ATTRIBUTE.search(message)
    if missing is not None and re.search(rf"\bself\.{missing[1]}\b", frame.code):
        place += " self"
    return place


def _any_matches(patterns: Iterable[re.Pattern[str]], places: Iterable[str]) -> bool:
    return any(pattern.search(place) for pattern in patterns for place in places)


def _covered_characters(texts: Sequence[_Text], patterns: Sequence[QuickPattern]) -> int | None:
    """Return how many characters the longest match covers, or None if no pattern matches.

    Only the first of `texts` that contains a match is considered.
    """
    for text, lowered in texts:
        matches = [pattern.search(text, lowered) for pattern in patterns]
        lengths = [match.end() - match.start() for match in matches if match is not None]
        if lengths:
            return max(lengths)
    return None
