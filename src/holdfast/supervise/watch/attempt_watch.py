"""`AttemptWatch`: what the watching threads know about an attempt, and where they report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.events.data import EventData
from holdfast.core.events.process_events import Hang
from holdfast.supervise.watch.limits import HangLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptWatch:
    """An attempt to watch. The functions may be called from any thread.

    Args:
        run_path: The run directory.
        attempt: Number of the attempt; processes of other attempts are ignored.
        limits: How long phases may take.
        emit: Records an event.
        on_hang: Called with each hang, including those that need no action but waiting.
        say: Prints a message.
    """

    run_path: Path
    attempt: int
    limits: HangLimits
    emit: Callable[[EventData], None]
    on_hang: Callable[[Hang], None]
    say: Callable[[str], None]
