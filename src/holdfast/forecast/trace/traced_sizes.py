"""A step at the micro-batch sizes at which it was traced, for steps that are another program at each size.

A list of samples, a loop over them or a branch on their number cannot be extrapolated: there is nothing that storages
of two such traces have in common. A few sizes are then traced themselves, and only these are planned with.

Does not: trace, or extrapolate (``extrapolation``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.forecast.trace.events import OWNERS, Trace

_MOST_SAMPLES = 64  # of a trace: a loop over samples takes as long as all of them one after the other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedSizes:
    """A step at some sizes.

    Args:
        traces: One for each, all with the same length, the smallest size first.
    """

    traces: tuple[Trace, ...]

    @property
    def template(self) -> Trace:
        """The trace of the largest size."""
        return self.traces[-1]

    @property
    def largest(self) -> int:
        """The largest size that can be asked for."""
        return self.template.micro_batch_size

    def planned_size(self, micro_batch_size: int) -> int:
        """Return the smallest size that was traced and is not below another."""
        return next(one.micro_batch_size for one in self.traces if one.micro_batch_size >= micro_batch_size)

    def at(self, micro_batch_size: int, length: int | None = None) -> Trace:
        """Return the step with at least this many samples.

        Args:
            micro_batch_size: At most `largest`.
            length: That of the traces.
        """
        assert length in (None, self.template.length), f"only length {self.template.length} was traced"
        size = self.planned_size(micro_batch_size)
        return next(one for one in self.traces if one.micro_batch_size == size)


def sizes_to_trace(global_batch_size: int | None) -> tuple[int, ...]:
    """Return the sizes to trace: powers of two, and the whole batch if it is no larger than the last of them."""
    most = min(global_batch_size or _MOST_SAMPLES, _MOST_SAMPLES)
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


def has_a_tensor_for_each_sample(traces: Sequence[Trace]) -> bool:
    """Return whether larger batches consist of more tensors: then no two sizes are alike."""
    batch = OWNERS.index("batch")
    return len({int((one.owner == batch).sum()) for one in traces}) > 1
