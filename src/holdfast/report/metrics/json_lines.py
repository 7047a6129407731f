"""JSON lines: one object for each step and each event, for any program that reads lines.

A value that is not finite is written as the text "NaN", "Infinity" or "-Infinity", since JSON has no such numbers.

Does not: replace a file; lines are appended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from holdfast.core.text import as_json_value
from holdfast.report.metrics.points import Happened, Point


class JsonLines:
    """Append to a file, or print.

    Args:
        target: A path, or "-" for the standard output.

    Raises:
        OSError: if the file cannot be opened.
    """

    def __init__(self, target: str) -> None:
        self.name = f"JSON lines in {target}"
        self._owned = target != "-"
        self._file = Path(target).open("a", encoding="utf-8") if self._owned else sys.stdout  # noqa: SIM115

    def write(self, points: list[Point], events: list[Happened]) -> None:
        """Append lines and hand them to the system."""
        for point in points:
            self._line(
                kind="step",
                time=round(point.unix_seconds, 6),
                process=point.process,
                rank=point.rank,
                attempt=point.attempt,
                step=point.step,
                **point.values,
            )
        for happened in events:
            event = happened.event
            self._line(
                kind="event",
                time=round(event.unix_seconds, 6),
                process=happened.process,
                attempt=happened.attempt,
                step=event.global_step,
                event=event.kind,
                facts=dict(event.data),
            )
        self._file.flush()

    def _line(self, **values: Any) -> None:
        self._file.write(json.dumps(as_json_value(values), separators=(",", ":"), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._owned:
            self._file.close()
