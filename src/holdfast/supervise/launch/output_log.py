"""The log of what a supervised command prints: a file of bounded size.

Once the file is full, its head and its newest part are kept and the middle is dropped, because the
beginning of a run and its end are what explains a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.core.durable import free_bytes
from holdfast.core.files import close_descriptor, created, open_file, opened
from holdfast.recorder.run_files import ATTEMPT_LINE

# Of a log that is too large, its first quarter and its newest half are kept.
_HEAD_SHARE = 4
_NEWEST_SHARE = 2
# After a full disk, writing is tried again once this much is free: half of a note says nothing.
_MIN_FREE_BYTES = 64 << 10
_COPY_BYTES = 1 << 20


class OutputLog:
    """Append what the command prints to a file, which may exist already.

    While the file is cut, a second one of up to three quarters of `max_bytes` exists beside it.

    Args:
        path: The file.
        max_bytes: Size above which the middle of the file is dropped.
        on_loss: Called once when writing begins to fail, and not again until something could be
            written.

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
        # The line that introduces the newest attempt, and where in the file it is.
        self._attempt_line = b""
        self._attempt_offset = 0
        self._at_line_start = True
        self._is_failing = False
        # Bytes that could not be written since something could, for example on a full disk.
        self.lost_bytes = 0

    def begin_attempt(self, number: int) -> None:
        """Write the line that separates attempts."""
        self._attempt_line = ATTEMPT_LINE.format(number=number).encode() + b"\n"
        if not self._at_line_start:
            self.write(b"\n")
        self._attempt_offset = self._size
        self.write(self._attempt_line)

    def write(self, data: bytes) -> None:
        """Append data.

        A full disk loses the data and nothing else. As soon as there is space again, a line in the
        file says how much was lost there.
        """
        self._at_line_start = data.endswith(b"\n")
        if self._size + len(data) > self._max_bytes:
            try:
                self._drop_the_middle()
            except OSError:
                # Let the file grow by a quarter, so that the next write does not try again.
                self._max_bytes += self._max_bytes // _HEAD_SHARE
        if self._note_lost_bytes():
            self._append(data)
        else:
            self.lost_bytes += len(data)

    def close(self) -> None:
        """Close the file."""
        close_descriptor(self._file)

    def _note_lost_bytes(self) -> bool:
        """Write how much was lost; return whether all losses are noted in the file now."""
        lost_bytes = self.lost_bytes
        if lost_bytes == 0:
            return True
        with suppress(OSError):
            if free_bytes(self._path.parent) < _MIN_FREE_BYTES:
                return False
        self.lost_bytes = 0
        self._append(b"\n--- holdfast: %d bytes could not be written ---\n" % lost_bytes)
        if self.lost_bytes > 0:
            # The note itself was lost. It is no output of the command, so it does not count.
            self.lost_bytes = lost_bytes
            return False
        return True

    def _append(self, data: bytes) -> None:
        remaining = memoryview(data)
        while remaining:
            try:
                written = os.write(self._file, remaining)
            except OSError as error:
                self.lost_bytes += len(remaining)
                if not self._is_failing:
                    self._is_failing = True
                    self._on_loss(error)
                return
            self._is_failing = False
            self._size += written
            remaining = remaining[written:]

    def _drop_the_middle(self) -> None:
        """Replace the file by its head and its newest part.

        Raises:
            OSError: If the new file cannot be written; the old one is then unchanged.
        """
        head_bytes = self._max_bytes // _HEAD_SHARE
        newest_offset = self._size - self._max_bytes // _NEWEST_SHARE
        if newest_offset <= head_bytes:
            return
        separator = b"\n--- holdfast: %d bytes left out ---\n" % (newest_offset - head_bytes)
        # Readers must know whose output follows, so the line of the attempt is never dropped.
        if head_bytes <= self._attempt_offset < newest_offset:
            self._attempt_offset = head_bytes + len(separator)
            separator += self._attempt_line
        elif self._attempt_offset >= newest_offset:
            self._attempt_offset += head_bytes + len(separator) - newest_offset
        temporary = self._path.with_name(f".tmp-{self._path.name}")
        try:
            with opened(self._path) as old, created(temporary) as new:
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
