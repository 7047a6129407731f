"""Standard streams by their descriptors, for signal handlers and the end of a process.

`sys.stderr` cannot be used there: a handler may interrupt one of its writes, and at the end of a
process it may be closed already.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress

_STDERR = 2
_STANDARD_STREAMS = (0, 1, 2)


def write_to_stderr(text: str) -> None:
    """Write a text to stderr, if that is possible without waiting.

    Nothing is written if stderr is closed, or is a pipe whose reader does not keep up. A pipe that
    is ready takes `select.PIPE_BUF` bytes at once, so a longer text is cut.
    """
    if sys.__stderr__ is None:
        # stderr was closed when the process started, so the descriptor may be that of another file.
        return
    with suppress(OSError):
        _, ready, _ = select.select([], [_STDERR], [], 0)
        if ready:
            data = text.encode(errors="backslashreplace")
            os.write(_STDERR, data[: select.PIPE_BUF])


def reserve_standard_descriptors() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise the next file that is opened gets its descriptor, and what C and C++ libraries write
    to stderr would land in that file.
    """
    for descriptor in _STANDARD_STREAMS:
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor is used, which is this one.
            os.open(os.devnull, os.O_RDWR)
