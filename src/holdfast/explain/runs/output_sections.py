"""Find the section of ``output.log`` that contains the output of an attempt.

All attempts of a run append their output to the same file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from holdfast.recorder.run_files import ATTEMPT_LINE

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSection:
    """The position of an attempt's output in the output file.

    Attributes:
        start: The offset of the section's first byte.
        end: The offset after the section's last byte.
        first_line: The line number of the section's first line, counted from 1.
    """

    start: int
    end: int
    first_line: int


def find_section(stream: BinaryIO, attempt: int) -> OutputSection:
    """Return the section of an attempt, which starts at the line that announces the attempt.

    If no line announces the attempt, the section starts at the beginning of the file. If several
    lines do, the section starts at the last of them, because a command may have printed such a line
    itself.

    Args:
        stream: The output file, positioned at its beginning.
        attempt: The number of the attempt, counted from 0.
    """
    own_line = ATTEMPT_LINE.format(number=attempt).encode()
    next_line = ATTEMPT_LINE.format(number=attempt + 1).encode()
    start = 0
    end: int | None = None
    first_line = 1
    # `pending` holds bytes that may be the beginning of an announcement. `offset` and `line` are
    # the offset and the line number of the first pending byte.
    offset = 0
    line = 1
    pending = b""
    while chunk := stream.read(_CHUNK_BYTES):
        data = pending + chunk
        own_place = data.rfind(own_line)
        if own_place >= 0:
            start = offset + own_place
            first_line = line + data.count(b"\n", 0, own_place)
            end = None
        next_place = data.find(next_line, max(own_place, 0))
        if next_place >= 0 and end is None:
            end = offset + next_place
        # Keep as many bytes as an announcement has, because one may be split between two chunks.
        pending = data[-len(next_line) :]
        passed = len(data) - len(pending)
        line += data.count(b"\n", 0, passed)
        offset += passed
    size = offset + len(pending)
    if end is None or end < start:
        end = size
    return OutputSection(start=start, end=end, first_line=first_line)


class SectionReader:
    """Reads a section of a stream as if the section were a separate file."""

    def __init__(self, stream: BinaryIO, section: OutputSection) -> None:
        stream.seek(section.start)
        self._stream = stream
        self._remaining = section.end - section.start

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes, or all remaining bytes if `size` is negative."""
        if size < 0 or size > self._remaining:
            size = self._remaining
        data = self._stream.read(size)
        self._remaining -= len(data)
        return data
