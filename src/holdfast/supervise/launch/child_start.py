"""The first moments of a supervised command: a program that sets the stage and becomes the command.

``python -I -S child_start.py <pid of the supervisor> <file to execute> COMMAND...`` runs in a
session of its own. It asks the kernel to be killed when the supervisor dies, undoes what the
interpreter did to signals, and executes the command in its place. A program, since no code should
run between fork and exec of a process that has threads; it does not import holdfast, since each
millisecond here is one that the user waits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as shells exit


def main(arguments: list[str]) -> None:
    """Become the command."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # no traceback of ours
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    supervisor, program, command = int(arguments[0]), arguments[1], arguments[2:]
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the kernel was asked
        os._exit(NOT_EXECUTABLE)
    # The interpreter ignores these two, and that is inherited
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(program, command)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.stderr.write(f"holdfast: {program} cannot be executed: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


if __name__ == "__main__":
    main(sys.argv[1:])
