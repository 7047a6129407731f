"""Thinned curves: bounded, and no dip, peak or gap is lost."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.report.series import series, thin


@settings(max_examples=80, deadline=None)
@given(values=st.lists(st.floats(width=32) | st.just(math.nan), min_size=1, max_size=300), most=st.integers(4, 64))
def test_thinning_keeps_extremes_ends_and_order(values, most):
    """Of any curve the smallest and largest finite value, both ends and the order remain, within the bound."""
    y = np.array(values, dtype=np.float64)
    x = np.arange(len(y), dtype=np.float64)
    steps, kept = thin(x, y, most)
    assert len(kept) <= max(most, 5 * (most // 4))
    assert (np.diff(steps) > 0).all()
    assert steps[0] == x[0]
    assert steps[-1] == x[-1]
    finite, kept_finite = y[np.isfinite(y)], kept[np.isfinite(kept)]
    if len(finite):
        assert (finite.min(), finite.max()) == (kept_finite.min(), kept_finite.max())
    assert (len(finite) < len(y)) == (len(kept_finite) < len(kept))


def test_nan_is_a_gap_in_a_loss_and_nothing_in_a_sampled_value():
    """A loss that became NaN breaks the line and is marked; a norm read at every tenth step is one line."""
    x = np.arange(1.0, 101.0)
    loss = np.where(x < 60, 1.0, np.nan)
    drawn = series(x, loss, np.ones(100, bool))
    assert np.isnan(drawn.values).sum() == 41
    assert list(drawn.nonfinite) == list(range(60, 101))
    sampled = np.where(x % 10 == 0, 2.0, np.nan)
    drawn = series(x, sampled)
    assert (len(drawn.values), len(drawn.nonfinite)) == (10, 0)
    drawn = series(np.arange(3.0), np.array([1.0, math.inf, 2.0]))  # which would stretch the axis
    assert (list(drawn.nonfinite), np.isfinite(drawn.values).sum()) == ([1.0], 2)
