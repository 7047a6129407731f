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
    """An attempt to watch, with callbacks for reports. The callbacks are thread-safe.

    Args:
        run_path: The run directory.
        attempt: Number of the attempt; processes of other attempts are ignored.
        limits: How long phases may go without progress.
        emit: Records an event.
        on_hang: Called with every hang, even if the remedy is only to wait.
        say: Prints a message.
    """

    run_path: Path
    attempt: int
    limits: HangLimits
    emit: Callable[[EventData], None]
    on_hang: Callable[[Hang], None]
    say: Callable[[str], None]
