"""Does a quantity grow? The Theil-Sen slope over time with its confidence interval."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK_SECONDS = 60.0  # neighbouring samples say the same: what is compared is medians of blocks


def slope_per_hour(seconds: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the median slope between two blocks, and the lower and upper end of its 95 % confidence interval.

    Args:
        seconds: When, ascending; shape ``(samples,)``, of 4 blocks at least.
        values: What was measured; shape ``(samples,)``.
    """
    block = ((seconds - seconds[0]) // _BLOCK_SECONDS).astype(int)
    times, heights = (np.array([np.median(each[block == b]) for b in np.unique(block)]) for each in (seconds, values))
    first, second = np.triu_indices(len(times), 1)
    slopes = np.sort((heights[second] - heights[first]) / (times[second] - times[first])) * 3600
    n = len(times)
    half = 1.96 * np.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2  # Sen 1968: from the variance of Kendall's S
    low, high = int((len(slopes) - 1) / 2 - half), int(np.ceil((len(slopes) - 1) / 2 + half))
    ends = slopes[max(low, 0)], slopes[min(high, len(slopes) - 1)]
    return float(np.median(slopes)), float(ends[0]), float(ends[1])
