"""JSON lines, TensorBoard and Weights & Biases.

Each is written by the client that its project maintains.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

from holdfast.core.text import as_json_value, sanitise
from holdfast.report.metrics.copying import Happened, Point

_TAGS = {
    "step_seconds": "time/step_seconds",
    "wait_share": "time/wait_share",
    "host_memory_bytes": "memory/host_bytes",
    "device_allocated_bytes": "memory/device_allocated_bytes",
    "device_reserved_bytes": "memory/device_reserved_bytes",
    "device_peak_bytes": "memory/device_peak_bytes",
}
# Of wandb since 0.19; those with x_ are not part of its public face. What the command prints, code,
# the state of git, packages and facts of the machine are not uploaded; the host's name, its own
# version and Python's are.
_ONLY_NUMBERS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class JsonLines:
    """Append an object for each step and event to a file, or print it.

    What is not finite is a text such as "NaN".
    """

    def __init__(self, target: str) -> None:
        self.name = f"JSON lines in {target}"
        self._owned = target != "-"
        self._file = Path(target).open("a", encoding="utf-8") if self._owned else sys.stdout  # noqa: SIM115

    def write(self, points: list[Point], events: list[Happened]) -> None:
        """Append lines, and flush them."""
        for point in points:
            each = point.scalar
            own = (
                {}
                if each is None
                else {"epoch": each.epoch, "name": each.name, "value": each.value}
            )
            self._line(
                kind="scalar" if own else "step",
                time=round(point.unix_seconds, 6),
                process=point.process,
                rank=point.rank,
                attempt=point.attempt,
                step=point.step,
                **(own or point.values),
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
        self._file.write(
            json.dumps(as_json_value(values), separators=(",", ":"), allow_nan=False) + "\n"
        )

    def close(self) -> None:
        """Close the file."""
        if self._owned:
            self._file.close()


class TensorBoard:
    """Write scalars, and events as text.

    A folder for each process and attempt, so that curves lie side by side.
    """

    def __init__(self, directory: Path) -> None:
        import tensorboardX

        self.name = f"TensorBoard in {directory}"
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._make = tensorboardX.SummaryWriter
        self._writers: dict[str, Any] = {}
        # It says "NaN or Inf found in input tensor" for each: here they are facts that are written
        # on purpose.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)

    def write(self, points: list[Point], events: list[Happened]) -> None:
        """Write and flush."""
        for point in points:
            writer = self._writer(point.process, point.attempt)
            for name, value in point.values.items():
                writer.add_scalar(
                    sanitise(_TAGS.get(name, name)), value, point.step, walltime=point.unix_seconds
                )
        for happened in events:
            event = happened.event
            facts = "\n".join(
                f"    {sanitise(key)}: {sanitise(value)}" for key, value in event.data.items()
            )
            self._writer("events", 0).add_text(  # indented: Markdown shows it as it stands
                sanitise(event.kind, most=60),
                f"    {sanitise(event.sentence())}\n    by: {sanitise(happened.process)}, attempt"
                f" {happened.attempt}\n{facts}",
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


class WandbRun:
    """Log to one run of a project.

    ``WANDB_MODE=offline`` and the like mean what they mean to wandb.
    """

    def __init__(self, project: str, name: str) -> None:
        import wandb

        self.name = f"Weights & Biases project {project}"
        settings = wandb.Settings(**_ONLY_NUMBERS)
        self._run: Any = wandb.init(
            project=project, name=name, job_type="holdfast", settings=settings
        )
        # Its own step may not go back, which a rollback or a restart does; so steps are a value of
        # their own.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, points: list[Point], events: list[Happened]) -> None:
        """Log each step; events are counted by kind."""
        for point in points:
            values = {
                f"{point.process}/{sanitise(name)}": value for name, value in point.values.items()
            }
            self._run.log({**values, "step": point.step, "attempt": point.attempt})
        for happened in events:
            key = f"events/{happened.event.kind}"
            self._run.summary[key] = self._run.summary.get(key, 0) + 1

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
