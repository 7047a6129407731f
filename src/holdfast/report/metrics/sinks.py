"""Sinks for JSON lines, TensorBoard and Weights & Biases; `open_sinks` opens them.

The sink for JSON lines needs no client library. The others use those of the respective tools.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import PolicyError
from holdfast.core.text import as_json_value, sanitise
from holdfast.report.metrics.copying import MetricPoint, Sink
from holdfast.report.sources import RecordedEvent

# TensorBoard tags of the values. TensorBoard groups charts by the part before the slash.
_TAGS = {
    "step_seconds": "time/step_seconds",
    "wait_share": "time/wait_share",
    "host_memory_bytes": "memory/host_bytes",
    "device_allocated_bytes": "memory/device_allocated_bytes",
    "device_reserved_bytes": "memory/device_reserved_bytes",
    "device_peak_bytes": "memory/device_peak_bytes",
}
# Settings that prevent wandb from uploading console output, code, git state, package lists and
# machine information. wandb has supported them since version 0.19. Names with the prefix ``x_`` are
# not part of its public API. The host name and the versions of wandb and Python are still uploaded.
_UPLOAD_NUMBERS_ONLY: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class JsonLines:
    """Writes one JSON object per step or event to a file or to stdout.

    Non-finite numbers are written as strings such as "NaN".

    Args:
        target: Path of the file, or "-" for stdout.
    """

    def __init__(self, target: str) -> None:
        self.name = f"JSON lines in {target}"
        self._is_stdout = target == "-"
        self._file = sys.stdout if self._is_stdout else Path(target).open("a", encoding="utf-8")  # noqa: SIM115 - `close` closes it

    def write(self, points: list[MetricPoint], events: list[RecordedEvent]) -> None:
        """Write one line per point and event, and flush them."""
        for point in points:
            self._write_line(_point_as_json(point))
        for recorded in events:
            self._write_line(_event_as_json(recorded))
        self._file.flush()

    def _write_line(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(as_json_value(dict(values)), separators=(",", ":"), allow_nan=False)
        self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file. If the target is stdout, it stays open."""
        if not self._is_stdout:
            self._file.close()


def _point_as_json(point: MetricPoint) -> dict[str, Any]:
    values = {
        "kind": "step" if point.scalar is None else "scalar",
        "time": round(point.unix_seconds, 6),
        "process": point.process,
        "rank": point.rank,
        "attempt": point.attempt,
        "step": point.step,
    }
    if point.scalar is None:
        return {**values, **point.values}
    return {
        **values,
        "epoch": point.scalar.epoch,
        "name": point.scalar.name,
        "value": point.scalar.value,
    }


def _event_as_json(recorded: RecordedEvent) -> dict[str, Any]:
    event = recorded.event
    return {
        "kind": "event",
        "time": round(event.unix_seconds, 6),
        "process": recorded.source,
        "attempt": recorded.attempt,
        "step": event.global_step,
        "event": event.kind,
        "facts": dict(event.data),
    }


class TensorBoard:
    """Writes values as TensorBoard scalars, and events as texts.

    Each process gets its own folder in each attempt, so TensorBoard shows the curves separately.

    Args:
        directory: Directory in which the folders are created.
    """

    def __init__(self, directory: Path) -> None:
        import tensorboardX

        self.name = f"TensorBoard in {directory}"
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._make_writer = tensorboardX.SummaryWriter
        self._writers: dict[str, Any] = {}
        # tensorboardX warns about every NaN and infinity, but in metrics these are real
        # measurements.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)

    def write(self, points: list[MetricPoint], events: list[RecordedEvent]) -> None:
        """Write points and events, and flush them."""
        for point in points:
            writer = self._writer(point.process, point.attempt)
            for name, value in point.values.items():
                tag = sanitise(_TAGS.get(name, name))
                writer.add_scalar(tag, value, point.step, walltime=point.unix_seconds)
        for recorded in events:
            event = recorded.event
            self._writer("events", 0).add_text(
                sanitise(event.kind, most=60),
                _event_text(recorded),
                event.global_step,
                walltime=event.unix_seconds,
            )
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, process: str, attempt: int) -> Any:
        folder = re.sub(r"\W+", "_", process).strip("_")
        if attempt:
            folder += f"-attempt{attempt}"
        if folder not in self._writers:
            self._writers[folder] = self._make_writer(logdir=str(self._directory / folder))
        return self._writers[folder]

    def close(self) -> None:
        """Close the files of all processes."""
        for writer in self._writers.values():
            writer.close()


def _event_text(recorded: RecordedEvent) -> str:
    """Return an event as Markdown. Its lines are indented, so that they are shown verbatim."""
    sentence = f"    {sanitise(recorded.event.sentence())}\n"
    source = f"    by: {sanitise(recorded.source)}, attempt {recorded.attempt}\n"
    facts = [
        f"    {sanitise(name)}: {sanitise(value)}" for name, value in recorded.event.data.items()
    ]
    return sentence + source + "\n".join(facts)


class WandbRun:
    """Logs to one run in a Weights & Biases project.

    The sink honors environment variables of wandb, such as ``WANDB_MODE``.

    Args:
        project: Name of the Weights & Biases project.
        name: Name of the run in the project.
    """

    def __init__(self, project: str, name: str) -> None:
        import wandb

        self.name = f"Weights & Biases project {project}"
        settings = wandb.Settings(**_UPLOAD_NUMBERS_ONLY)
        self._run: Any = wandb.init(
            project=project, name=name, job_type="holdfast", settings=settings
        )
        # wandb's own step must not decrease. The training step does decrease after a rollback or a
        # restart, so it is logged as a separate value.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, points: list[MetricPoint], events: list[RecordedEvent]) -> None:
        """Log the values of each step, and the number of events of each kind."""
        for point in points:
            values = {
                f"{point.process}/{sanitise(name)}": value for name, value in point.values.items()
            }
            self._run.log({**values, "step": point.step, "attempt": point.attempt})
        for recorded in events:
            key = f"events/{recorded.event.kind}"
            self._run.summary[key] = self._run.summary.get(key, 0) + 1

    def close(self) -> None:
        """Finish the wandb run."""
        self._run.finish()


# The functions that open each kind of sink, given a target and a run directory.
_OPENERS: dict[str, Callable[[str, Path], Sink]] = {
    "tensorboard": lambda target, _run: TensorBoard(Path(target)),
    "jsonl": lambda target, _run: JsonLines(target),
    "wandb": lambda target, run: WandbRun(target, run.name),
}
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def open_sinks(targets: Mapping[str, str], run: Path) -> list[Sink]:
    """Open and return a sink for each target.

    Args:
        targets: Targets, keyed by kind, such as ``{"tensorboard": "tb", "jsonl": "-"}``.
        run: The run directory.

    Raises:
        PolicyError: H742 if a client is not installed, H743 if a target cannot be used.
    """
    return [_open(kind, target, run) for kind, target in targets.items()]


def _open(kind: str, target: str, run: Path) -> Sink:
    try:
        return _OPENERS[kind](target, run)
    except ImportError as error:
        raise PolicyError(
            f"the client for {kind} is not installed ({error.name})",
            limit="metrics are written through the client library of each tool",
            fix=f"pip install {_PACKAGES[kind]}",
            rule="H742",
        ) from error
    except Exception as error:
        # Each client library raises its own types of exceptions, so catch all of them.
        raise PolicyError(
            f"metrics target {kind}={target!r} cannot be opened "
            f"({type(error).__name__}: {sanitise(error, most=300)})",
            limit="the target must be writable",
            fix="correct the target, or choose another one.",
            rule="H743",
        ) from error
