"""Read the losses of the steps that processes and Guards recorded.

Steps that cannot be read are silently omitted. `Recordings.events` reports the damage when it reads
the events in the same folder.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.core.errors import HoldfastError
from holdfast.recorder.progress import StepSample, read_samples
from holdfast.recorder.reader import StepRecord, read_steps
from holdfast.recorder.run_files import SAMPLES_FILE

# The smallest number of records that one row of ``recorder.history`` summarizes.
_RECORDS_OF_A_ROW = 64


class LossReading(NamedTuple):
    """The loss of one step."""

    step: int
    loss: float
    # The number that identifies the optimizer that stepped, or 0 if it was not recorded.
    optimizer: int = 0


def read_process_samples(folder: Path) -> list[StepSample]:
    """Return the steps that a process recorded, oldest first."""
    try:
        return read_samples(folder / SAMPLES_FILE) if (folder / SAMPLES_FILE).exists() else []
    except (HoldfastError, OSError, ValueError):
        return []


def read_guard_steps(
    folder: Path, *, began: float = 0.0, until: float = math.inf
) -> list[StepRecord]:
    """Return the steps that a Guard committed between two Unix times, oldest first."""
    try:
        return [step for step in read_steps(folder) if began <= step.unix_seconds < until]
    except (HoldfastError, OSError, ValueError):
        return []


def read_newest_guard_step(folder: Path) -> StepRecord | None:
    """Return the newest step that a Guard committed, or None if there is none."""
    return max(read_guard_steps(folder), key=lambda step: step.unix_seconds, default=None)


def read_guard_losses(folder: Path, until: float) -> list[LossReading]:
    """Return the losses of the steps that a Guard committed before a Unix time, oldest first."""
    return [
        LossReading(step.global_step, step.loss, step.optimizer)
        for step in read_guard_steps(folder, until=until)
        if step.loss is not None
    ]


def read_process_losses(folder: Path) -> list[LossReading]:
    """Return the losses that a process recorded, oldest first.

    The sample ring holds only the newest steps. For older steps, the history contains means over
    many steps. If there is a history, the losses of the newest steps are averaged in the same way,
    so that all losses are equally noisy.
    """
    readings = [
        LossReading(sample.step, sample.loss, sample.optimizer)
        for sample in read_process_samples(folder)
        if sample.loss is not None
    ]
    history = folder / f"{SAMPLES_FILE}.history"
    if not history.exists():
        return readings
    # Imported here because importing numpy takes a tenth of a second.
    from holdfast.recorder.history import NAMES, read_history

    loss_column = NAMES.index("loss")
    first_step = readings[0].step if readings else math.inf
    older = [
        LossReading(
            step=int(row["step"]),
            loss=float(row["mean"][loss_column]),
            optimizer=int(row["optimizer"]),
        )
        for row in read_history(folder / SAMPLES_FILE).rows
        if row["finite"][loss_column] and row["step"] < first_step
    ]
    return [*older, *_means(readings)]


def _means(readings: Sequence[LossReading]) -> list[LossReading]:
    """Return the means of each optimizer's readings over as many steps as a history row covers."""
    means: list[LossReading] = []
    for optimizer in dict.fromkeys(reading.optimizer for reading in readings):
        own = [reading for reading in readings if reading.optimizer == optimizer]
        for start in range(0, len(own), _RECORDS_OF_A_ROW):
            stretch = own[start : start + _RECORDS_OF_A_ROW]
            mean = statistics.fmean(reading.loss for reading in stretch)
            means.append(stretch[0]._replace(loss=mean))
    return sorted(means, key=lambda reading: reading.step)
