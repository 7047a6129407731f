"""TensorBoard event files, by tensorboardX: one folder for each process and attempt, so that curves lie side by side.

Does not: start TensorBoard.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from holdfast.core.text import sanitise
from holdfast.report.metrics.points import Happened, Point

_TAGS = {
    "step_seconds": "time/step_seconds",
    "wait_share": "time/wait_share",
    "host_memory_bytes": "memory/host_bytes",
    "device_allocated_bytes": "memory/device_allocated_bytes",
    "device_reserved_bytes": "memory/device_reserved_bytes",
    "device_peak_bytes": "memory/device_peak_bytes",
}


class TensorBoard:
    """Write scalars, and events as text.

    Args:
        directory: What TensorBoard's ``--logdir`` gets.

    Raises:
        ImportError: without tensorboardX.
        OSError: if the directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        import tensorboardX

        self.name = f"TensorBoard in {directory}"
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._make = tensorboardX.SummaryWriter
        self._writers: dict[str, Any] = {}
        # It says "NaN or Inf found in input tensor" for each: here they are facts that are written on purpose.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)

    def write(self, points: list[Point], events: list[Happened]) -> None:
        """Write and flush."""
        for point in points:
            writer = self._writer(point.process, point.attempt)
            for name, value in point.values.items():
                writer.add_scalar(_TAGS.get(name, name), value, point.step, walltime=point.unix_seconds)
        for happened in events:
            event = happened.event
            facts = "\n".join(f"    {sanitise(key)}: {sanitise(value)}" for key, value in event.data.items())
            self._writer("events", 0).add_text(  # indented: Markdown shows it as it stands
                sanitise(event.kind, most=60),
                f"    by: {sanitise(happened.process)}, attempt {happened.attempt}\n{facts}",
                event.global_step,
                walltime=event.unix_seconds,
            )
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, process: str, attempt: int) -> Any:
        folder = re.sub(r"\W+", "_", process).strip("_") + (f"-attempt{attempt}" if attempt else "")
        if folder not in self._writers:
            self._writers[folder] = self._make(logdir=str(self._directory / folder))
        return self._writers[folder]

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
