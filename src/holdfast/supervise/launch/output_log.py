"""`OutputLog`: what a supervised command prints, in a file of bounded size.

Once the file is full, its beginning and its newest part are kept and the middle is dropped, because
the beginning and the end of a run are what explains a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from holdfast.core.files import close_descriptor, create_file, open_file, open_to_read
from holdfast.recorder.run_files import ATTEMPT_LINE

# When a log exceeds its maximum size, a quarter of that size is kept at the beginning, and half of
# it at the end.
_HEAD_DIVISOR = 4
_NEWEST_DIVISOR = 2
# Written where output is missing because the disk was full.
_GAP_LINE = b"\n--- holdfast: output is missing here ---\n"
_COPY_BYTES = 1 << 20


class OutputLog:
    """Append what the command prints to a file, which may already exist.

    While the file is being cut, a temporary file of up to three quarters of `max_bytes` exists
    beside it.

    Args:
        path: The file.
        max_bytes: Size above which the middle of the file is dropped.
        on_loss: Called once when writing starts to fail, and again only after a write has succeeded
            in between.

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
        # The line that introduces the newest attempt, and its position in the file.
        self._attempt_line = b""
        self._attempt_offset = 0
        self._at_line_start = True
        # Whether the newest write has failed.
        self._is_failing = False

    def begin_attempt(self, number: int) -> None:
        """Write the line that separates attempts."""
        self._attempt_line = ATTEMPT_LINE.format(number=number).encode() + b"\n"
        if not self._at_line_start:
            self.write(b"\n")
        self._attempt_offset = self._size
        self.write(self._attempt_line)

    def write(self, data: bytes) -> None:
        """Append data.

        If the disk is full, the data is lost but nothing else breaks. As soon as there is space
        again, a line in the file shows where output is missing.
        """
        self._at_line_start = data.endswith(b"\n")
        if self._size + len(data) > self._max_bytes:
            try:
                self._drop_the_middle()
            except OSError:
                # Let the file grow by a quarter, so that the next write does not try again.
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
        """Replace the file by its beginning and its newest part.

        Raises:
            OSError: If the new file cannot be written; the old one is left unchanged.
        """
        head_bytes = self._max_bytes // _HEAD_DIVISOR
        newest_offset = self._size - self._max_bytes // _NEWEST_DIVISOR
        if newest_offset <= head_bytes:
            return
        separator = b"\n--- holdfast: %d bytes left out ---\n" % (newest_offset - head_bytes)
        # Readers must know which attempt the output belongs to, so its heading is never dropped.
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
