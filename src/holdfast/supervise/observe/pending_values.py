"""Complete recorded samples with numbers that arrive from a GPU some steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from holdfast.recorder.progress import SampleRing
from holdfast.supervise.observe.values import PendingValue, ValueReader

_Kind = Literal["loss", "part of a loss", "grad_norm"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A value that is still being copied, the number of its sample, and an amount to add to it."""

    sample: int
    kind: _Kind
    value: PendingValue
    addend: float = 0.0


class PendingValues:
    """Values that are still being copied, in the order of their steps.

    Args:
        reader: Takes back the slots of values that have arrived.
    """

    def __init__(self, reader: ValueReader) -> None:
        self._reader = reader
        # Public, because the caller checks at every step whether there are any.
        self.entries: deque[_Entry] = deque()
        # The next loss to complete is a sum; this is the sum of its parts that have arrived.
        self._sum_of_parts = 0.0

    def add_loss(
        self, sample: int, parts: Iterable[PendingValue], last_part: PendingValue, known_part: float
    ) -> None:
        """Add the loss of a step: the sum over its backward calls.

        Args:
            sample: Number of the sample in its ring.
            parts: Losses of earlier backward calls that are still being copied.
            last_part: The loss of the last call.
            known_part: Sum of the losses of earlier calls that are already known.
        """
        self.entries.extend(_Entry(sample, "part of a loss", part) for part in parts)
        self.entries.append(_Entry(sample, "loss", last_part, addend=known_part))

    def add_norm(self, sample: int, norm: PendingValue) -> None:
        """Add the gradient norm of a step."""
        self.entries.append(_Entry(sample, "grad_norm", norm))

    def complete(self, samples: SampleRing) -> None:
        """Write the values that have arrived into their samples, without waiting for the others."""
        while self.entries and self.entries[0].value.has_arrived():
            entry = self.entries.popleft()
            number = entry.value.value()
            if entry.kind == "part of a loss":
                self._sum_of_parts += number
            elif entry.kind == "loss":
                samples.amend(entry.sample, loss=number + (entry.addend + self._sum_of_parts))
                self._sum_of_parts = 0.0
            else:
                samples.amend(entry.sample, grad_norm=number)
            self._reader.release(entry.value)
