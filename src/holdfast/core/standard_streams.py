"""Use the standard streams through their descriptors, in signal handlers and at process exit.

`sys.stderr` is unsafe in both cases: a signal may have interrupted a write to it, and at exit it
may already be closed. It also blocks forever if it is a pipe that nobody reads.
"""

from __future__ import annotations

import os
import select
import sys
import time
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


def write_to_stderr_within(text: str, seconds: float) -> bool:
    """Write text to stderr, and wait up to a number of seconds for a pipe that is full.

    Args:
        text: The text.
        seconds: How long to wait for the reader of the pipe in total.

    Returns:
        Whether all of the text was written. It is False if nobody reads the pipe, or if stderr is
        closed.
    """
    if sys.__stderr__ is None:
        return False
    deadline = time.monotonic() + seconds
    remaining = memoryview(text.encode(errors="backslashreplace"))
    try:
        while remaining:
            wait_seconds = max(0.0, deadline - time.monotonic())
            _, ready, _ = select.select([], [_STDERR], [], wait_seconds)
            if not ready:
                return False
            # A pipe that is ready accepts this many bytes without blocking.
            remaining = remaining[os.write(_STDERR, remaining[: select.PIPE_BUF]) :]
    except OSError:
        return False
    return True


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
