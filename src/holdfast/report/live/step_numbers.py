"""Compute, from a process's newest steps, the numbers that the live view shows for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from holdfast.recorder.progress import Standing, StepSample
from holdfast.recorder.run_files import read_optimizers
from holdfast.report.live.outlook import RATE_SAMPLES
from holdfast.report.run_snapshot import ProcessSnapshot
from holdfast.report.sources import RunSource


def newest_step(standing: Standing | None, samples: Sequence[StepSample]) -> int:
    """Return a process's current step, from its progress board or else from its newest sample."""
    if standing is not None and standing.step:
        return standing.step
    return samples[-1].step if samples else 0


def steps_per_second(samples: Sequence[StepSample], now: float | None) -> float:
    """Return the mean rate of the newest steps in steps per second; NaN if unknown.

    If a live process has recorded nothing for longer than two steps usually take, that time is
    included, so the rate decreases.

    Args:
        samples: Samples of a process, oldest first.
        now: The current Unix time; None if the process has ended.
    """
    newest = [sample for sample in samples[-RATE_SAMPLES:] if sample.seconds > 0]
    seconds = math.fsum(sample.seconds for sample in newest)
    if not seconds > 0:
        return math.nan
    if now is not None:
        silent_seconds = now - newest[-1].unix_seconds
        if silent_seconds > 2 * seconds / len(newest):
            seconds += silent_seconds
    return len(newest) / seconds


def with_numbers(process: ProcessSnapshot, samples: Sequence[StepSample]) -> ProcessSnapshot:
    """Return a copy of a snapshot with the fields that are computed from the newest steps."""
    losses = tuple(sample.loss for sample in samples if sample.loss is not None)
    return replace(
        process,
        loss=losses[-1] if losses else None,
        losses=losses,
        grad_norm=_newest_number(samples, "grad_norm"),
        learning_rate=_newest_number(samples, "learning_rate"),
        wait_share=_wait_share(samples),
        host_bytes=_newest_size(samples, "host_bytes"),
        device_bytes=_newest_size(samples, "device_allocated_bytes"),
    )


def by_optimizer(
    process: ProcessSnapshot, source: RunSource, samples: Sequence[StepSample]
) -> tuple[ProcessSnapshot, ...]:
    """Return one snapshot per optimizer that has stepped; empty if there is only one optimizer."""
    names = read_optimizers(source.directory)
    if len(names) < 2:
        return ()
    processes = []
    for number, name in enumerate(names, start=1):
        own_samples = [sample for sample in samples if sample.optimizer == number]
        if own_samples:
            labelled = replace(process, label=f"{process.label}, {name}")
            processes.append(with_numbers(labelled, own_samples))
    return tuple(processes)


def _newest_number(samples: Sequence[StepSample], name: str) -> float | None:
    """Return the newest known value of a field that is None at some steps, or None."""
    for sample in reversed(samples):
        value: float | None = getattr(sample, name)
        if value is not None:
            return value
    return None


def _newest_size(samples: Sequence[StepSample], name: str) -> int:
    """Return the newest known value of a size that is 0 at steps without a reading, or 0."""
    for sample in reversed(samples):
        size: int = getattr(sample, name)
        if size:
            return size
    return 0


def _wait_share(samples: Sequence[StepSample]) -> float:
    """Return the share of time that was spent waiting for data; NaN if unknown."""
    timed = [sample for sample in samples if sample.seconds > 0 and sample.wait_seconds >= 0]
    seconds = math.fsum(sample.seconds for sample in timed)
    if not seconds > 0:
        return math.nan
    return math.fsum(sample.wait_seconds for sample in timed) / seconds
