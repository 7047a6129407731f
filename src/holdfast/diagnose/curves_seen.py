"""What the samples of steps say at the end of a run: since when its loss was not finite.

Does not: judge (see ``telling``), or fit trends (see ``supervise.trends``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.recorder.progress import StepSample, read_samples

_FEWEST = 5
"""Steps in a row, to the end: fewer can be losses that were not read yet, or a step that was skipped."""
_LONGER_THAN_GAPS = 4
"""Times that the end must be longer than any gap before it, since a loss that was not read shows as NaN too."""


def lost_since(paths: Iterable[Path]) -> int | None:
    """Return the step since which the loss of a process was not finite until its end; None: it was, or nobody knows.

    Args:
        paths: Of rings of samples, one for each process. The earliest step of all counts.
    """
    found = []
    for path in paths:
        try:
            step = not_finite_since(read_samples(path)) if path.exists() else None
        except (HoldfastError, OSError, ValueError):
            continue  # damaged: then it says nothing
        if step is not None:
            found.append(step)
    return min(found, default=None)


def not_finite_since(samples: Sequence[StepSample]) -> int | None:
    """Return the step since which losses are not finite to the end, if they were finite, and read, before."""
    lost = 0
    while lost < len(samples) and not math.isfinite(samples[-1 - lost].loss):
        lost += 1
    if lost < _FEWEST or lost == len(samples):
        return None
    longest = gap = 0
    before = samples[: len(samples) - lost]
    first = next(index for index, each in enumerate(before) if math.isfinite(each.loss))
    for each in before[first:]:
        gap = gap + 1 if math.isnan(each.loss) else 0
        longest = max(longest, gap)
    return samples[-lost].step if lost >= _LONGER_THAN_GAPS * longest else None
