"""`Measurements`: values that are measured on the device in a step, and read by the host later.

An observation is made in two parts. While a step runs, functions named ``measure_...`` compute
small tensors on the device, and add them with `Measurements.add`. Once the step is known to count,
the host reads all of these tensors together, and passes their values to functions named
``note_...``, which change the observations. No observation changes before that, so the measurements
of a step that was undone can be dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from holdfast.memory.host_copy import HostCopies

# Receives the values of the tensors that were added with it, each as a CPU tensor.
Note: TypeAlias = Callable[..., None]


@dataclass(frozen=True, slots=True)
class _Measurement:
    """The function that notes a measurement, and its values on the device."""

    note: Note
    tensors: tuple[Tensor, ...]


class Measurements:
    """The measurements of one step, in the order in which they were taken."""

    def __init__(self) -> None:
        self._measurements: list[_Measurement] = []
        # The values on their way to the host. None before `start_copy`.
        self._copies: HostCopies | None = None

    def __len__(self) -> int:
        return len(self._measurements)

    def add(self, note: Note, *tensors: Tensor) -> None:
        """Add a measurement, without waiting for its values. After `start_copy`, it is dropped.

        Args:
            note: Function that notes the values. It must not refer to large tensors, because it is
                kept until the step is known to count.
            *tensors: The values, in small tensors that nothing else changes.
        """
        if self._copies is not None:
            # A loss that the script keeps after its step can still run backward.
            return
        detached = tuple(tensor.detach() for tensor in tensors)
        self._measurements.append(_Measurement(note, detached))

    def start_copy(self) -> None:
        """Start to copy the values to the host, without waiting for the device."""
        self._copies = HostCopies(self._tensors(), blocking=False)

    def note_all(self) -> None:
        """Note all measurements, in order, and remove them.

        The host waits for the device once, unless the copies of `start_copy` are complete.
        """
        copies = self._copies or HostCopies(self._tensors(), blocking=True)
        measurements = self._measurements
        self._measurements = []
        self._copies = None
        values = iter(copies.read())
        for measurement in measurements:
            measurement.note(*[next(values) for _ in measurement.tensors])

    def _tensors(self) -> list[Tensor]:
        return [tensor for measurement in self._measurements for tensor in measurement.tensors]
