"""`StepWriter`: write every step that has ended into the ring of samples.

On a GPU, the loss and the gradient norm of a step arrive some steps later. They complete its sample
then, and nothing waits for them.
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
    """One step, and what was measured of it. Times are in nanoseconds, on the monotonic clock.

    The class has no `__init__`, because its call would cost time at every step.
    """

    # When the step began; 0 if unknown.
    began_at = 0
    # `ProgressBoard.micro_step` when it began.
    first_micro_step = 0
    # When it last began to wait for the loader, and how long it has waited in total.
    wait_began_at = 0
    waited = 0
    # Whether its loss and norm are read.
    reads_values = True
    # Loss of the last backward call.
    loss: _Value = None
    # Losses of earlier backward calls: the sum of those that are known, and those that are still
    # being copied.
    earlier_loss = 0.0
    earlier_parts: tuple[PendingValue, ...] = ()
    # Gradient norm.
    norm: _Value = None

    # The following is set when the step ends: its number as the script counts, its number of
    # backward calls, its duration in seconds, the rate of the first parameter group, and the memory
    # in use.
    number = 0
    micro_steps = 0
    seconds = math.nan
    learning_rate: float | None = None
    memory: MemoryUse = NOT_READ


@dataclass(frozen=True, slots=True)
class _LateValue:
    """A value that is still being copied, the number of its sample, and an amount to add to it."""

    sample: int
    kind: Literal["loss", "part of a loss", "grad_norm"]
    value: PendingValue
    addend: float = 0.0


class StepWriter:
    """Records the steps of this process, and the settings of its optimizers.

    `reader` takes back the slots of values that have arrived.
    """

    def __init__(self, observer: ObservedProcess, reader: ValueReader) -> None:
        self._observer = observer
        self._reader = reader
        # None until the first step has ended, or if the ring cannot be created.
        self._samples: SampleRing | None = None
        self._cannot_record = False
        # The values that are still being copied, in the order of their steps.
        self.late_values: deque[_LateValue] = deque()
        # The next loss to complete is a sum; this is the sum of its parts that have arrived.
        self._sum_of_parts = 0.0
        # Number of the newest sample as long as the gradients of its step still exist, so that a
        # norm computed now is that of this step; otherwise 0.
        self.newest_sample = 0
        # Numbers of the optimizers in the ring, by `id`.
        self._optimizer_numbers: dict[int, int] = {}
        # The settings of the training run.
        self._settings: dict[str, Any] = {}

    def record(self, step: Step, optimizer: Any) -> None:
        """Record a step that has ended; values still being copied complete the sample later.

        Args:
            step: The step.
            optimizer: The optimizer that has stepped; None if backward calls are counted.
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
        # If earlier losses are still being copied, the sum is not known yet.
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
        # Without a backward, a norm that is computed later cannot be that of this step.
        self.newest_sample = number if step.micro_steps else 0
        if step.earlier_parts or isinstance(loss, PendingValue):
            self._complete_loss_later(number, step)
        if isinstance(norm, PendingValue):
            self.late_values.append(_LateValue(number, "grad_norm", norm))
        if self.late_values:
            self.complete()

    def amend_norm(self, norm: _Value) -> None:
        """Add the gradient norm to the newest sample, whose step has ended already."""
        if isinstance(norm, PendingValue):
            self.late_values.append(_LateValue(self.newest_sample, "grad_norm", norm))
        elif self._samples is not None:
            self._samples.amend(self.newest_sample, grad_norm=norm)

    def complete(self) -> None:
        """Write the values that have arrived into their samples, without waiting for the others."""
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
        """Let a loss still being copied complete its sample; without its last part, drop it."""
        if isinstance(step.loss, PendingValue):
            for part in step.earlier_parts:
                self.late_values.append(_LateValue(sample, "part of a loss", part))
            last = _LateValue(sample, "loss", step.loss, addend=step.earlier_loss)
            self.late_values.append(last)
        else:
            for part in step.earlier_parts:
                # The slot can be reused at once: its next copy follows this one in the stream.
                self._reader.release(part)

    def _register_optimizer(self, optimizer: Any, samples: SampleRing) -> int:
        """Number an optimizer that has not stepped before, and return the number; 0 for None.

        Its name and settings are recorded, unless a guard records them.
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
        """Note the batch size of a loader, one of the settings of the training run."""
        sampler = getattr(loader, "batch_sampler", None)
        batch_size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        if batch_size is not None:
            self._settings.setdefault("batch_size", batch_size)

    def _open_samples(self) -> SampleRing | None:
        """Return the ring of samples; None on a full disk, where steps are still counted."""
        if self._cannot_record:
            return None
        try:
            self._samples = self._observer.open_samples()
        except OSError as error:
            self._cannot_record = True
            self._observer.note_error(error)
            self._observer.emit(StepsNotRecorded(error=error.strerror or str(error)))
        return self._samples
