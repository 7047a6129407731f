"""`AttemptWatch`: the interface between the watching threads and the attempt that they watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.events.data import EventData
from holdfast.core.events.process_events import Hang
from holdfast.supervise.watch.limits import HangLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptWatch:
    """The attempt that the threads watch, and the thread-safe callbacks by which they report.

    Args:
        run_path: The run directory.
        attempt: Number of the attempt; processes of other attempts are ignored.
        limits: Determines how long each phase may go without progress.
        emit: Records an event.
        on_hang: Called with every hang, even if the proposed remedy is only to wait.
        say: Prints a message for the user.
    """

    run_path: Path
    attempt: int
    limits: HangLimits
    emit: Callable[[EventData], None]
    on_hang: Callable[[Hang], None]
    say: Callable[[str], None]
