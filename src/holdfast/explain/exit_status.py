"""Convert exit statuses to signals and to text.

As in `subprocess`, the status of a process is its exit code or, if a signal ended the process, the
negated signal number. For signal *n*, a shell reports the exit code 128 + *n* instead.
"""

from __future__ import annotations

import signal

_SHELL_OFFSET = 128
# The highest signal number on Linux.
_HIGHEST_SIGNAL = 64

# Signals that usually come from another process. All other signals are usually caused by the
# process that receives them.
SIGNALS_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def as_signal(status: int | None) -> int | None:
    """Return -n for a shell's exit code 128 + n, and any other status unchanged."""
    if status is not None and _SHELL_OFFSET < status <= _SHELL_OFFSET + _HIGHEST_SIGNAL:
        return _SHELL_OFFSET - status
    return status


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``"SIGKILL"``, or an empty string if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def is_signal_name(name: str) -> bool:
    """Return whether a text is the name of a signal."""
    return name in signal.Signals.__members__


def status_text(status: int) -> str:
    """Return a status in words, such as ``"SIGKILL (status 137 in a shell)"``."""
    number = -(as_signal(status) or 0)
    if number > 0 and signal_name(number):
        return f"{signal_name(number)} (status {_SHELL_OFFSET + number} in a shell)"
    if status < 0:
        return f"signal {-status}"
    return f"status {status}"
