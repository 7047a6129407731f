"""Read a log of any size in one pass with bounded memory, and keep only the lines that matter.

The beginning and the end of the log are kept. From the middle, only the lines that contain an error
word (see ``words.txt``) are kept, together with a few lines before and after each of them. Line
numbers start at 1, as in an editor. ``log_text`` interprets the lines.
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
# Memory limits for the lines that are kept from the beginning of the log, from its end, and from
# its middle (the first and the newest hits). A hit is a line with an error word. The overhead is
# the size of the Python object for a line.
_HEAD_BYTES = 3 << 18
_TAIL_BYTES = 1 << 20
_FIRST_HITS_BYTES = 1 << 19
_NEWEST_HITS_BYTES = 1 << 20
_LINE_OVERHEAD_BYTES = 64
# Only this many bytes at each end of a line are kept. The middle of a longer line is omitted.
_HALF_LINE_BYTES = 1 << 14
# How many lines are kept before and after a hit, because a message may have several lines.
_LINES_BEFORE = 2
_LINES_AFTER = 12
_LINES_AFTER_TRACEBACK = 300
# Of lines that differ only in digits, at most this many are hits.
_MAX_REPEATS = 40
# Repetitions are counted for this many distinct lines. All other lines with an error word are hits.
_MAX_DISTINCT_LINES = 10_000
# How many bytes at the beginning of two lines are compared to find repetitions.
_COMPARED_BYTES = 120

# The error words in lower case. With `bytes.find`, blocks that contain none of these words are
# skipped quickly. The variants of "inf" are defined here because an entry in the word file cannot
# contain spaces or line terminators.
_WORD_FILE = resources.files("holdfast.explain.logs").joinpath("words.txt")
_INFINITE = (b" inf,", b" inf ", b" inf\n", b" inf\r")
_WORDS = (*_WORD_FILE.read_text("utf-8").encode().split(b"\n")[:-1], *_INFINITE)
_TRACEBACK = b"raceback (most recent call last)"
_DIGITS = re.compile(rb"\d+")


class Readable(Protocol):
    """A readable stream of bytes, such as a file opened in binary mode."""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes, or no bytes at the end of the stream."""
        ...


class LogLine(NamedTuple):
    """One line of a log, without its line terminator."""

    # The number of the line. The first line of a log has number 1.
    number: int
    # The bytes of the line. The middle of a very long line is omitted.
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LogExcerpt:
    """The lines of a log that were kept because they may matter."""

    # The lines in log order.
    lines: tuple[LogLine, ...]
    # The number of lines in the whole log.
    total_lines: int
    # Whether all lines of the log were kept.
    complete: bool


def read_excerpt(stream: Readable, *, first_number: int = 1) -> LogExcerpt:
    """Read a log to its end and return the lines that matter.

    At most about 30 MiB of memory are used, regardless of the number and length of the lines.

    Args:
        stream: The log.
        first_number: The number to assign to the first line in the stream.
    """
    head: list[LogLine] = []
    head_bytes = 0
    hits = _Hits()
    tail = _Tail()
    # The line number of the first line of the current block.
    number = first_number
    for block in _blocks(stream):
        line_count = block.count(b"\n")
        weight = len(block) + _LINE_OVERHEAD_BYTES * line_count
        if head_bytes < _HEAD_BYTES:
            head += _split(block, number)
            head_bytes += weight
        else:
            hits.search(block, number)
            tail.append(block, number, weight)
        number += line_count
    lines = {line.number: line for line in (*head, *hits.lines(), *tail.lines())}
    in_order = tuple(lines[key] for key in sorted(lines))
    total = in_order[-1].number - first_number + 1 if in_order else 0
    return LogExcerpt(lines=in_order, total_lines=total, complete=len(in_order) == total)


def _blocks(stream: Readable) -> Iterator[bytes]:
    """Yield blocks of whole lines, omitting the middle of extremely long lines."""
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


def _lines_of(block: bytes) -> list[bytes]:
    """Return the lines of a block without their line terminators."""
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _split(block: bytes, first: int) -> list[LogLine]:
    """Return the lines of a block, numbered from `first`."""
    return [LogLine(first + index, _cut(line)) for index, line in enumerate(_lines_of(block))]


def _cut(line: bytes) -> bytes:
    """Return a line, without its middle if it is very long."""
    if len(line) <= 2 * _HALF_LINE_BYTES:
        return line
    return line[:_HALF_LINE_BYTES] + b" ... " + line[-_HALF_LINE_BYTES:]


class _Tail:
    """The newest blocks of a log, of which about `_TAIL_BYTES` are kept."""

    def __init__(self) -> None:
        # Each block, with the line number of its first line and its size in bytes with overhead.
        self._blocks: deque[tuple[bytes, int, int]] = deque()
        self._bytes = 0

    def append(self, block: bytes, first: int, weight: int) -> None:
        self._blocks.append((block, first, weight))
        self._bytes += weight
        while self._bytes - self._blocks[0][2] >= _TAIL_BYTES:
            self._bytes -= self._blocks.popleft()[2]

    def lines(self) -> Iterator[LogLine]:
        for block, first, _ in self._blocks:
            yield from _split(block, first)


class _Hits:
    """The lines with error words (hits), with a few lines before and after each hit.

    If there are too many of these lines, only the first and the newest lines are kept.
    """

    def __init__(self) -> None:
        self._first: list[LogLine] = []
        self._first_bytes = 0
        self._newest: deque[LogLine] = deque()
        self._newest_bytes = 0
        # How often each line has occurred, ignoring digits.
        self._counts: dict[bytes, int] = {}
        # Lines up to this line number are kept because they follow a hit.
        self._keep_until = 0

    def search(self, block: bytes, first: int) -> None:
        """Find the hits in a block and keep them.

        Args:
            block: The block.
            first: The line number of the block's first line.
        """
        lowered = block.lower()
        if first > self._keep_until and not any(word in lowered for word in _WORDS):
            return
        lines = _lines_of(block)
        with_word = _find_lines_with_words(lowered, lines)
        # The index of the last line that was kept, or -1 if none was. No line is kept twice.
        newest_kept = -1
        for index, line in enumerate(lines):
            number = first + index
            if index in with_word and self._record_hit(line):
                after = _LINES_AFTER_TRACEBACK if _TRACEBACK in line else _LINES_AFTER
                self._keep_until = max(self._keep_until, number + after)
                # Also keep the lines before the hit that were not kept already.
                for before in range(max(newest_kept + 1, index - _LINES_BEFORE), index):
                    self._keep(LogLine(first + before, _cut(lines[before])))
            elif number > self._keep_until:
                continue
            self._keep(LogLine(number, _cut(line)))
            newest_kept = index

    def _record_hit(self, line: bytes) -> bool:
        """Count a line with an error word, and return whether it is a hit.

        The line is not a hit if the same line, ignoring digits, has already been a hit
        `_MAX_REPEATS` times. A traceback header is always a hit.
        """
        if _TRACEBACK in line:
            return True
        without_digits = _DIGITS.sub(b"", line.lower()[:_COMPARED_BYTES])
        count = self._counts.get(without_digits, 0)
        if without_digits in self._counts or len(self._counts) < _MAX_DISTINCT_LINES:
            self._counts[without_digits] = count + 1
        return count < _MAX_REPEATS

    def _keep(self, line: LogLine) -> None:
        size = len(line.data) + _LINE_OVERHEAD_BYTES
        if self._first_bytes < _FIRST_HITS_BYTES:
            self._first.append(line)
            self._first_bytes += size
            return
        self._newest.append(line)
        self._newest_bytes += size
        while self._newest_bytes > _NEWEST_HITS_BYTES:
            oldest = self._newest.popleft()
            self._newest_bytes -= len(oldest.data) + _LINE_OVERHEAD_BYTES

    def lines(self) -> list[LogLine]:
        """Return the lines that were kept, in log order."""
        return [*self._first, *self._newest]


def _find_lines_with_words(lowered: bytes, lines: list[bytes]) -> set[int]:
    """Return the indices of the lines in a block that contain an error word.

    The whole block is searched for each word, because searching line by line takes ten times as
    long.

    Args:
        lowered: The block in lower case.
        lines: The lines of the block, without line terminators.
    """
    # The offset of each line in the block, and of the end of the block. The 1 counts the line
    # terminator.
    starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
    indices: set[int] = set()
    for word in _WORDS:
        if len(indices) == len(lines):
            break
        position = lowered.find(word)
        while position >= 0:
            index = bisect.bisect_right(starts, position) - 1
            indices.add(index)
            # One hit per line is enough, so continue the search on the next line.
            position = lowered.find(word, starts[index + 1])
    return indices


def find_lines_with_error_words(texts: Sequence[str]) -> set[int]:
    """Return the indices of the lines that contain an error word."""
    lines = [text.lower().encode("utf-8", errors="replace") for text in texts]
    return _find_lines_with_words(b"\n".join([*lines, b""]), lines)


def has_error_word(text: str) -> bool:
    """Return whether a line contains an error word."""
    return bool(find_lines_with_error_words([text]))
