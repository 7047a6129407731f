"""Use the standard streams through their descriptors, in signal handlers and at process exit.

`sys.stderr` is unsafe in both cases: a signal may have interrupted a write to it, and at exit it
may already be closed.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress

_STDERR = 2
_STANDARD_STREAMS = (0, 1, 2)


def write_to_stderr(text: str) -> None:
    """Write text to stderr, unless the write would block.

    Nothing is written if stderr is closed, or if it is a pipe that is full because its reader does
    not keep up. The text is truncated to `select.PIPE_BUF` bytes, the amount that a ready pipe
    accepts without blocking.
    """
    if sys.__stderr__ is None:
        # stderr was closed when the process started, so another file may now have its descriptor.
        return
    with suppress(OSError):
        _, ready, _ = select.select([], [_STDERR], [], 0)
        if ready:
            data = text.encode(errors="backslashreplace")
            os.write(_STDERR, data[: select.PIPE_BUF])


def reserve_standard_descriptors() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise, the next file to be opened would get the free descriptor, and messages that C and C++
    libraries write to stderr could end up in that file.
    """
    for descriptor in _STANDARD_STREAMS:
        try:
            os.fstat(descriptor)
        except OSError:
            # `os.open` uses the lowest free descriptor, which is `descriptor`.
            os.open(os.devnull, os.O_RDWR)
