"""`StepWriter`: record every completed step as a sample in the ring buffer.

On a GPU, the loss and the gradient norm of a step reach the host a few steps later. They are then
added to the step's sample, so training never waits for them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from holdfast.core.events.process_events import StepsNotRecorded
from holdfast.recorder.progress import SampleRing
from holdfast.recorder.run_files import guarded
from holdfast.supervise.observe.observed_process import ObservedProcess
from holdfast.supervise.observe.optimizer_facts import settings_of
from holdfast.supervise.observe.values import NOT_READ, MemoryUse, PendingValue, ValueReader

_Value: TypeAlias = float | PendingValue | None


class Step:
    """Measurements of one step. Times are in nanoseconds, on the monotonic clock.

    The class has no `__init__`, because calling it would cost time at every step.
    """

    # Start time of the step; 0 if unknown.
    began_at = 0
    # Value of `ProgressBoard.micro_step` at the start of the step.
    first_micro_step = 0
    # When the last wait for the loader began, and the total time of all waits.
    wait_began_at = 0
    waited = 0
    # Whether the loss and the gradient norm are read in this step.
    reads_values = True
    # Loss of the last backward call.
    loss: _Value = None
    # Losses of earlier backward calls in the same step: the sum of those that are known, and those
    # that are still being copied.
    earlier_loss = 0.0
    earlier_parts: tuple[PendingValue, ...] = ()
    # Gradient norm.
    norm: _Value = None

    # These fields are set when the step ends: the step number in the script's own count, the number
    # of backward calls, the duration in seconds, the learning rate of the first parameter group,
    # and the memory use.
    number = 0
    micro_steps = 0
    seconds = math.nan
    learning_rate: float | None = None
    memory: MemoryUse = NOT_READ


@dataclass(frozen=True, slots=True)
class _LateValue:
    """A value that is still being copied from a GPU, to be added to a sample.

    Args:
        sample: Number of the sample.
        kind: The field of the sample to update. A "part of a loss" is added to the loss that
            follows it.
        value: The value.
        addend: Number to add to the value: the sum of the parts of the loss that are known.
    """

    sample: int
    kind: Literal["loss", "part of a loss", "grad_norm"]
    value: PendingValue
    addend: float = 0.0


class StepWriter:
    """Records the steps of this process and the settings of its optimizers.

    Args:
        observer: Opens the ring buffer and records settings.
        reader: Takes back the pinned-memory slots of values that have arrived.
    """

    def __init__(self, observer: ObservedProcess, reader: ValueReader) -> None:
        self._observer = observer
        self._reader = reader
        # None until the first step has ended, or if the ring cannot be created.
        self._samples: SampleRing | None = None
        self._cannot_record = False
        # Values that are still being copied, in the order of their steps.
        self.late_values: deque[_LateValue] = deque()
        # The loss of a step may be a sum over backward calls. This is the sum of the parts that
        # have arrived for the next loss to be completed.
        self._sum_of_parts = 0.0
        # Number of the newest sample while the gradients of its step still exist: a norm that is
        # computed now belongs to that step. Otherwise 0.
        self.newest_sample = 0
        # Number of each optimizer in the ring buffer, keyed by the optimizer's `id`.
        self._optimizer_numbers: dict[int, int] = {}
        # Settings of the training run, which are recorded each time an optimizer is registered.
        self._settings: dict[str, Any] = {}

    def record(self, step: Step, optimizer: Any) -> None:
        """Record a completed step. Values that are still being copied are added later.

        Args:
            step: The completed step.
            optimizer: The optimizer that has stepped; None if backward calls count as steps.
        """
        samples = self._samples or self._open_samples()
        if samples is None:
            return
        optimizer_number = self._optimizer_numbers.get(id(optimizer))
        if optimizer_number is None:
            optimizer_number = self._register_optimizer(optimizer, samples)
        loss = step.loss
        norm = step.norm
        known_loss = None
        # While earlier losses are still being copied, their sum is unknown.
        if type(loss) is float and not step.earlier_parts:
            known_loss = loss + step.earlier_loss
        number = samples.write(
            step.number,
            step.micro_steps,
            known_loss,
            norm if type(norm) is float else None,
            step.learning_rate,
            step.seconds,
            step.waited / 1e9,
            *step.memory,
            optimizer=optimizer_number,
        )
        # A step without a backward call has no gradients whose norm could be computed later.
        self.newest_sample = number if step.micro_steps else 0
        if step.earlier_parts or isinstance(loss, PendingValue):
            self._complete_loss_later(number, step)
        if isinstance(norm, PendingValue):
            self.late_values.append(_LateValue(number, "grad_norm", norm))
        if self.late_values:
            self.complete()

    def amend_norm(self, norm: _Value) -> None:
        """Add a gradient norm to the newest sample, whose step has already ended."""
        if isinstance(norm, PendingValue):
            self.late_values.append(_LateValue(self.newest_sample, "grad_norm", norm))
        elif self._samples is not None:
            self._samples.amend(self.newest_sample, grad_norm=norm)

    def complete(self) -> None:
        """Write the values that have arrived to their samples, without waiting for the others."""
        while self._samples is not None and self.late_values:
            late = self.late_values[0]
            if not late.value.has_arrived():
                return
            self.late_values.popleft()
            number = late.value.value()
            if late.kind == "part of a loss":
                self._sum_of_parts += number
            elif late.kind == "loss":
                self._samples.amend(late.sample, loss=number + (late.addend + self._sum_of_parts))
                self._sum_of_parts = 0.0
            else:
                self._samples.amend(late.sample, grad_norm=number)
            self._reader.release(late.value)

    def _complete_loss_later(self, sample: int, step: Step) -> None:
        """Write the loss to the step's sample once all of its parts have reached the host.

        If the loss of the last backward call could not be read, its earlier parts are dropped.
        """
        if isinstance(step.loss, PendingValue):
            for part in step.earlier_parts:
                self.late_values.append(_LateValue(sample, "part of a loss", part))
            last = _LateValue(sample, "loss", step.loss, addend=step.earlier_loss)
            self.late_values.append(last)
        else:
            for part in step.earlier_parts:
                # The slot can be reused immediately: the next copy into it follows this one in the
                # stream.
                self._reader.release(part)

    def _register_optimizer(self, optimizer: Any, samples: SampleRing) -> int:
        """Return a new number for an optimizer that has not stepped before, or 0 for None.

        The optimizer's settings are recorded too, unless it belongs to a guard, which records them.
        """
        if optimizer is None:
            return 0
        guard_entry = guarded.get(id(optimizer))
        if guard_entry is not None:
            name = guard_entry[0]
        else:
            name = f"{type(optimizer).__name__} {len(self._optimizer_numbers) + 1}"
        number = samples.optimizers[name]
        self._optimizer_numbers[id(optimizer)] = number
        if guard_entry is None:
            self._settings |= settings_of(optimizer, name)
            self._observer.write_settings(self._settings)
        return number

    def note_loader(self, loader: Any) -> None:
        """Add the batch size of a loader to the settings of the training run."""
        sampler = getattr(loader, "batch_sampler", None)
        batch_size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        if batch_size is not None:
            self._settings.setdefault("batch_size", batch_size)

    def _open_samples(self) -> SampleRing | None:
        """Open the ring buffer; if this fails, return None, and steps are only counted."""
        if self._cannot_record:
            return None
        try:
            self._samples = self._observer.open_samples()
        except OSError as error:
            self._cannot_record = True
            self._observer.note_error(error)
            self._observer.emit(StepsNotRecorded(error=error.strerror or str(error)))
        return self._samples
