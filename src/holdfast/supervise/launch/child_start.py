"""The program that turns a new process into the supervised command.

``python -I -S child_start.py <PID of the supervisor> <file to execute> COMMAND...`` runs in its own
session. The program asks the kernel to kill the process when the supervisor dies, restores the
signal handlers that Python changed at startup, and then replaces itself with the command (exec).

It is a separate program because a process with threads should run no code between fork and exec. It
does not import holdfast, because that would delay the user's command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# Exit codes that shells use if a command cannot be executed or found.
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def main(arguments: list[str]) -> None:
    """Replace this process with the command; see the module docstring for the arguments."""
    supervisor = int(arguments[0])
    program = arguments[1]
    command = arguments[2:]
    # Ctrl-C must end this program without a traceback.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        # The supervisor died before the kernel received the request.
        os._exit(NOT_EXECUTABLE)
    # Python ignores these two signals at startup, and the command would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(program, command)  # noqa: S606 - a shell is not wanted
    except OSError as error:
        sys.stderr.write(f"holdfast: {program} cannot be executed: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


if __name__ == "__main__":
    main(sys.argv[1:])
