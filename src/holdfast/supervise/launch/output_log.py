"""`OutputLog`: store the output of a supervised command in a log file of limited size.

When the file is full, its middle is dropped. Its beginning and its newest part are kept, because
they usually explain a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from holdfast.core.files import close_descriptor, create_file, open_file, open_to_read
from holdfast.recorder.run_files import ATTEMPT_LINE

# When a log exceeds its maximum size, a quarter of that size is kept from the beginning of the log
# and half of that size from the end.
_HEAD_DIVISOR = 4
_NEWEST_DIVISOR = 2
# Marks a place where output is missing because the disk was full.
_GAP_LINE = b"\n--- holdfast: output is missing here ---\n"
_COPY_BYTES = 1 << 20


class OutputLog:
    """Appends the command's output to a file, which may already exist.

    Dropping the middle needs a temporary file of up to three quarters of `max_bytes` in the same
    directory.

    Args:
        path: The log file.
        max_bytes: Size above which the middle of the file is dropped.
        on_loss: Called with the error when a write fails, and not again until a write has
            succeeded.

    Raises:
        OSError: If the file cannot be opened.
    """

    def __init__(
        self, path: Path, max_bytes: int, on_loss: Callable[[OSError], None] = lambda _: None
    ) -> None:
        self._path = path
        self._on_loss = on_loss
        self._max_bytes = max_bytes
        self._file = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._file).st_size
        # The heading of the newest attempt, and its position in the file.
        self._attempt_line = b""
        self._attempt_offset = 0
        self._at_line_start = True
        # Whether the last write failed.
        self._is_failing = False

    def begin_attempt(self, number: int) -> None:
        """Write the heading line of an attempt."""
        self._attempt_line = ATTEMPT_LINE.format(number=number).encode() + b"\n"
        if not self._at_line_start:
            self.write(b"\n")
        self._attempt_offset = self._size
        self.write(self._attempt_line)

    def write(self, data: bytes) -> None:
        """Append data to the file.

        If the disk is full, only this data is lost. Once a write succeeds again, a line in the file
        marks the place where output is missing.
        """
        self._at_line_start = data.endswith(b"\n")
        if self._size + len(data) > self._max_bytes:
            try:
                self._drop_the_middle()
            except OSError:
                # Allow the file to grow by a quarter before trying again.
                self._max_bytes += self._max_bytes // _HEAD_DIVISOR
        if self._is_failing:
            data = _GAP_LINE + data
        self._append(data)

    def close(self) -> None:
        """Close the file."""
        close_descriptor(self._file)

    def _append(self, data: bytes) -> None:
        remaining = memoryview(data)
        try:
            while remaining:
                written = os.write(self._file, remaining)
                self._size += written
                remaining = remaining[written:]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True
                self._on_loss(error)

    def _drop_the_middle(self) -> None:
        """Rewrite the file with only its beginning and its newest part.

        Raises:
            OSError: If the new file cannot be written. The old file stays unchanged.
        """
        head_bytes = self._max_bytes // _HEAD_DIVISOR
        newest_offset = self._size - self._max_bytes // _NEWEST_DIVISOR
        if newest_offset <= head_bytes:
            return
        separator = b"\n--- holdfast: %d bytes left out ---\n" % (newest_offset - head_bytes)
        # Keep the heading of the newest attempt, so that readers know which attempt wrote the
        # output.
        if head_bytes <= self._attempt_offset < newest_offset:
            self._attempt_offset = head_bytes + len(separator)
            separator += self._attempt_line
        elif self._attempt_offset >= newest_offset:
            self._attempt_offset += head_bytes + len(separator) - newest_offset
        temporary = self._path.with_name(f".tmp-{self._path.name}")
        try:
            with open_to_read(self._path) as old, create_file(temporary) as new:
                new.write(old.read(head_bytes))
                new.write(separator)
                old.seek(newest_offset)
                while piece := old.read(_COPY_BYTES):
                    new.write(piece)
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        close_descriptor(self._file)
        self._file = open_file(self._path, os.O_WRONLY | os.O_APPEND)
        self._size = os.fstat(self._file).st_size
