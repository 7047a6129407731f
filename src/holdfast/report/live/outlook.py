"""Describe the progress of a run in words: epoch, step, time left and throughput.

The lengths of epochs and of the run come from events that a guard's training loop records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.core.events.event import Event
from holdfast.core.text import duration
from holdfast.recorder.progress import StepSample

# Number of newest steps over which the current rate is measured.
RATE_SAMPLES = 50
NO_GUARD = "only a Guard records epoch, time left and samples/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopProgress:
    """The position of a guard's training loop, and its length as far as events have shown it.

    Args:
        since: Unix time at which the loop started.
        step: Optimizer step of the run at the newest event.
        epochs: Number of epochs completed at the newest event.
        max_epochs: Number of epochs after which the loop ends; None without such a limit.
        max_steps: Optimizer step after which the loop ends; None without such a limit.
        epoch_steps: Optimizer steps per epoch; 0 until an epoch has ended.
        epoch_batches: Batches per epoch.
        batch_size: Samples per batch; 0 if unknown.
    """

    since: int
    step: int
    epochs: int = 0
    max_epochs: int | None = None
    max_steps: int | None = None
    epoch_steps: int = 0
    epoch_batches: int = 0
    batch_size: int = 0

    @property
    def total_steps(self) -> int | None:
        """Return the optimizer step at which the loop ends, or None if it is not known yet."""
        totals = []
        if self.max_steps is not None:
            totals.append(self.max_steps)
        if self.max_epochs is not None and self.epoch_steps:
            totals.append(self.step + (self.max_epochs - self.epochs) * self.epoch_steps)
        return min(totals, default=None)

    def epoch_at(self, step: int) -> int:
        """Return the number of the epoch that contains a step, counted from 1."""
        epoch = self.epochs + 1
        if self.epoch_steps:
            epoch += max(0, step - self.step) // self.epoch_steps
        return epoch if self.max_epochs is None else min(epoch, self.max_epochs)


def loop_progress(event: Event, previous: LoopProgress | None) -> LoopProgress | None:
    """Return a loop's progress after an event. An event unrelated to progress does not change it.

    Args:
        event: An event of a guard, of any kind.
        previous: The progress before the event, or None before the loop has started.
    """
    if event.kind == "loop":
        return LoopProgress(
            since=int(event.unix_seconds),
            step=event.global_step,
            epochs=_count(event, "epoch") or 0,
            max_epochs=_count(event, "max_epochs"),
            max_steps=_count(event, "max_steps"),
        )
    if event.kind == "epoch_ended":
        if previous is None:
            previous = LoopProgress(since=int(event.unix_seconds), step=event.global_step)
        counts = {
            "epochs": _count(event, "epochs"),
            "epoch_steps": _count(event, "steps"),
            "epoch_batches": _count(event, "batches"),
            "batch_size": _count(event, "batch_size"),
        }
        # If the event lacks a number, keep the one from the previous epoch.
        known_counts = {name: count for name, count in counts.items() if count is not None}
        return replace(previous, step=event.global_step, **known_counts)
    return previous


def _count(event: Event, name: str) -> int | None:
    """Return a field of an event, or None if it is not a count because the record is damaged."""
    value = event.data.get(name)
    return value if type(value) is int and value >= 0 else None


def describe_outlook(
    progress: LoopProgress, samples: Sequence[StepSample], *, now: float, ranks: int
) -> str:
    """Return the progress of a loop in words, beginning for example with "epoch 2 of 5, step 300".

    Args:
        progress: The recorded progress of the loop.
        samples: The newest steps of the loop's process, oldest first.
        now: The current Unix time.
        ranks: Number of processes that train together.
    """
    of_loop = [sample for sample in samples if sample.unix_seconds >= progress.since]
    step = of_loop[-1].step if of_loop else progress.step
    rate = _steps_per_second(of_loop[-RATE_SAMPLES:], now)
    parts = [
        _epoch(progress, step),
        _step(progress, step),
        _time_left(progress, step, rate),
        _throughput(progress, rate, ranks),
    ]
    return ", ".join(part for part in parts if part)


def _steps_per_second(samples: Sequence[StepSample], now: float) -> float:
    """Return the number of steps per second of wall-clock time.

    The step durations that a guard records are not used, because they exclude waiting for data.
    """
    if not samples:
        return 0.0
    seconds = now - samples[0].unix_seconds
    return (samples[-1].step - samples[0].step) / seconds if seconds > 0 else 0.0


def _epoch(progress: LoopProgress, step: int) -> str:
    epoch = f"epoch {progress.epoch_at(step)}"
    return epoch if progress.max_epochs is None else f"{epoch} of {progress.max_epochs}"


def _step(progress: LoopProgress, step: int) -> str:
    total = progress.total_steps
    if total is None:
        return f"step {step:,} of an unknown total"
    return f"step {step:,} of {total:,}"


def _time_left(progress: LoopProgress, step: int, rate: float) -> str:
    total = progress.total_steps
    if total is None or rate <= 0:
        return ""
    return f"{duration(max(0, total - step) / rate)} left"


def _throughput(progress: LoopProgress, rate: float, ranks: int) -> str:
    if not progress.epoch_steps:
        return "samples/s unknown"
    samples_per_epoch = ranks * progress.epoch_batches * progress.batch_size
    samples_per_second = samples_per_epoch * rate / progress.epoch_steps
    if not samples_per_second:
        return "samples/s unknown"
    return (
        f"{three_digits(samples_per_second)} samples/s and {three_digits(rate)} steps/s including"
        " pauses"
    )


def three_digits(rate: float) -> str:
    """Format a rate with three significant digits, such as "1,230" or "0.457"."""
    return f"{float(f'{rate:.3g}'):,g}"
