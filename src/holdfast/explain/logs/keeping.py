"""Which lines of a log are kept: a log of any size in bounded memory and one pass.

Kept are the beginning, the end, and between them every line with a word that errors have, with what
stands around it.
Lines are numbered as an editor numbers them. Does not: understand the lines (see ``text``).
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple, Protocol

_CHUNK_BYTES = 1 << 16
_HEAD_BYTES = 3 << 18
_TAIL_BYTES = 1 << 20
_FIRST_HITS_BYTES = 1 << 19
_NEWEST_HITS_BYTES = 1 << 20
_OF_A_LINE = 64  # bytes that a line counts for beside its own, since it is kept as an object
_LINE_BYTES = 1 << 14  # of one line: its beginning and its end
_AFTER = 12  # lines that are kept after a hit: a message of several lines
_AFTER_TRACEBACK = 300
_BEFORE = 2
# Times that lines which differ only in digits are kept outside the head and the tail
_SAME_LINE = 40

# In lower case. A chunk without any of them is passed over at the speed of bytes.find.
_FILE = resources.files("holdfast.explain.logs").joinpath("words.txt")
_INFINITE = (b" inf,", b" inf ", b" inf\n", b" inf\r")
_WORDS = (*_FILE.read_text("utf-8").encode().split(b"\n")[:-1], *_INFINITE)
_TRACEBACK = b"raceback (most recent call last)"
_DIGITS = re.compile(rb"\d+")


class Readable(Protocol):
    """What can be read as bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to so many bytes, none at the end."""
        ...


class LogLine(NamedTuple):
    """One line as it was written, without its end."""

    number: int  # from 1
    data: bytes  # cut in the middle if it is very long


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLog:
    """What was kept of a log."""

    lines: tuple[LogLine, ...]  # in order
    total_lines: int  # of the whole log
    complete: bool  # whether nothing was left out


def keep_lines(stream: Readable, *, first_number: int = 1) -> KeptLog:
    """Read a log to its end and return what matters of it, in some 30 MiB at most, whatever its
    size and lines.
    """
    head: list[LogLine] = []
    hits = _Hits()
    tail: deque[tuple[int, bytes, int]] = deque()
    head_bytes = tail_bytes = 0
    number = first_number  # of the first line of the block
    for block in _blocks(stream):
        count = block.count(b"\n")
        weight = len(block) + _OF_A_LINE * count
        if head_bytes < _HEAD_BYTES:
            head += _split(block, number)
            head_bytes += weight
        else:
            hits.search(block, number)
            tail.append((number, block, weight))
            tail_bytes += weight
            while tail_bytes - tail[0][2] >= _TAIL_BYTES:
                tail_bytes -= tail.popleft()[2]
        number += count
    lines = {line.number: line for line in head}
    lines |= {line.number: line for line in hits.kept()}
    for first, block, _ in tail:
        lines |= {line.number: line for line in _split(block, first)}
    ordered = tuple(lines[key] for key in sorted(lines))
    total = ordered[-1].number - first_number + 1 if ordered else 0
    return KeptLog(lines=ordered, total_lines=total, complete=len(ordered) == total)


def _blocks(stream: Readable) -> Iterator[bytes]:
    """Yield whole lines in blocks; an endless line is cut in its middle."""
    rest = b""
    while chunk := stream.read(_CHUNK_BYTES):
        whole, newline, after = chunk.rpartition(b"\n")
        if newline:
            yield rest + whole + newline
            rest = after
        else:
            rest = _cut(rest + chunk)
    if rest:
        yield rest


def _split(block: bytes, first: int) -> list[LogLine]:
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [LogLine(first + index, _cut(line)) for index, line in enumerate(lines)]


def _cut(line: bytes) -> bytes:
    if len(line) <= 2 * _LINE_BYTES:
        return line
    return line[:_LINE_BYTES] + b" ... " + line[-_LINE_BYTES:]


class _Hits:
    """Lines between the head and the tail that look like they matter.

    The first and the newest of them.
    """

    def __init__(self) -> None:
        self._first: list[LogLine] = []
        self._first_bytes = 0
        self._newest: deque[LogLine] = deque()
        self._newest_bytes = 0
        self._seen: dict[bytes, int] = {}
        self._until = 0  # number up to which lines are kept since something before them was a hit

    def search(self, block: bytes, first: int) -> None:
        lowered = block.lower()
        if first > self._until and not any(word in lowered for word in _WORDS):
            return
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        kept_to = -1
        with_word = _lines_with_words(lowered, lines)
        for index, line in enumerate(lines):
            number = first + index
            if index in with_word and self._is_hit(line):
                after = _AFTER_TRACEBACK if _TRACEBACK in line else _AFTER
                self._until = max(self._until, number + after)
                for before in range(max(kept_to + 1, index - _BEFORE), index):
                    self._keep(LogLine(first + before, _cut(lines[before])))
            elif number > self._until:
                continue
            self._keep(LogLine(number, _cut(line)))
            kept_to = index

    def _is_hit(self, line: bytes) -> bool:
        lowered = line.lower()
        if _TRACEBACK in line:
            return True
        key = _DIGITS.sub(b"", lowered[:120])
        times = self._seen.get(key, 0)
        if len(self._seen) < 10_000:  # a log of lines that are all different: then all count
            self._seen[key] = times + 1
        return times < _SAME_LINE

    def _keep(self, line: LogLine) -> None:
        size = len(line.data) + _OF_A_LINE
        if self._first_bytes < _FIRST_HITS_BYTES:
            self._first.append(line)
            self._first_bytes += size
            return
        self._newest.append(line)
        self._newest_bytes += size
        while self._newest_bytes > _NEWEST_HITS_BYTES:
            self._newest_bytes -= len(self._newest.popleft().data) + _OF_A_LINE

    def kept(self) -> list[LogLine]:
        return [*self._first, *self._newest]


def _lines_with_words(lowered: bytes, lines: list[bytes]) -> set[int]:
    """Return the indices of the lines of a block that have a word that errors have.

    Word by word through the whole block: line by line takes ten times as long.
    """
    starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
    found: set[int] = set()
    for word in _WORDS:
        if len(found) == len(lines):
            break
        at = lowered.find(word)
        while at >= 0:
            index = bisect.bisect_right(starts, at) - 1
            found.add(index)
            at = lowered.find(word, starts[index + 1])
    return found


def relevant_lines(texts: Sequence[str]) -> set[int]:
    """Return the indices of the lines that have a word that errors have."""
    lines = [text.lower().encode("utf-8", errors="replace") for text in texts]
    return _lines_with_words(b"\n".join([*lines, b""]), lines)


def is_relevant(text: str) -> bool:
    """Return whether a line has a word that errors have."""
    return bool(relevant_lines([text]))
