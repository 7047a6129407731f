"""Mark the line that a verdict blames in the recorded stacks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.explain.verdict import Verdict
from holdfast.report.page.gathered_run import RecordedStacks

# Matches the place of a verdict, such as "/home/ada/train.py:31 in forward".
_PLACE = re.compile(r"(?:^|/)(?P<file>[^/:]+):(?P<line>\d+)(?: in |$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPart:
    """Some lines of a stack dump. `is_cause` says whether it is a line that the verdict blames."""

    text: str
    is_cause: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedStacks:
    """A stack dump whose blamed lines are marked.

    Args:
        name: Path of the file, relative to the run directory.
        parts: The text, in parts. Joined, they are the whole text.
        is_open: Whether the page unfolds it at first, because it is the newest with a marked line.
    """

    name: str
    parts: tuple[StackPart, ...]
    is_open: bool = False

    @property
    def has_cause(self) -> bool:
        """Return whether any line is marked."""
        return any(part.is_cause for part in self.parts)


def mark_stacks(stacks: Iterable[RecordedStacks], verdict: Verdict | None) -> list[MarkedStacks]:
    """Return stack dumps in which the lines at the verdict's place are marked."""
    pattern = None if verdict is None else _lines_at(verdict.where)
    marked = [
        MarkedStacks(name=dump.name, parts=tuple(_split(dump.text, pattern))) for dump in stacks
    ]
    with_cause = [number for number, dump in enumerate(marked) if dump.has_cause]
    if with_cause:
        newest = marked[with_cause[-1]]
        marked[with_cause[-1]] = MarkedStacks(name=newest.name, parts=newest.parts, is_open=True)
    return marked


def _lines_at(where: str) -> re.Pattern[str] | None:
    """Return a pattern that matches the lines of a stack at a place, or None without a place.

    Stacks name it as ``File "FILE", line 31 in forward`` or as ``forward (FILE:31)``.
    """
    place = _PLACE.search(where)
    if place is None:
        return None
    file = re.escape(place["file"])
    line = place["line"]
    return re.compile(rf'^.*(?<![\w.-]){file}(?:", line |:){line}(?!\d).*$', re.MULTILINE)


def _split(text: str, pattern: re.Pattern[str] | None) -> Iterable[StackPart]:
    """Yield the parts of a text: lines that match the pattern, and the text between them."""
    end = 0
    if pattern is not None:
        for match in pattern.finditer(text):
            yield StackPart(text=text[end : match.start()], is_cause=False)
            yield StackPart(text=match[0], is_cause=True)
            end = match.end()
    yield StackPart(text=text[end:], is_cause=False)
