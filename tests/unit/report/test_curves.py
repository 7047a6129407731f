"""Thinned curves: bounded, and no dip, peak or gap is lost."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.report.made_runs import sample, write_samples

from holdfast.report.curves import curves_of_steps, rows_of_ring, thinned


def _curve(path: Path, losses: list[float | None], most: int = 2000, **changes):
    write_samples(
        path, [sample(step, loss=loss, **changes) for step, loss in enumerate(losses, start=1)]
    )
    ring = rows_of_ring(path)
    return curves_of_steps(thinned(ring[:0], ring, most))


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=32) | st.just(math.nan), min_size=1, max_size=300),
    most=st.integers(4, 64),
)
def test_thinning_keeps_extremes_ends_and_order(tmp_path_factory, values, most):
    """Of any curve the extremes, the order and the steps that are not finite remain, within the
    bound.
    """
    loss = _curve(tmp_path_factory.mktemp("run") / "ring", values, most)["loss"]
    finite = [value for value in values if math.isfinite(value)]
    assert len(loss.values) <= most // 2
    assert (np.diff(loss.steps) > 0).all()
    assert loss.steps[0] == 1
    if finite:
        assert (min(finite), max(finite)) == (loss.finite.min(), loss.finite.max())
    assert (len(finite) < len(values)) == (len(loss.nonfinite) > 0)


def test_nan_is_a_gap_in_a_loss_and_nothing_in_a_sampled_value(tmp_path):
    """A loss that became NaN breaks the line and is marked.

    A norm read at every tenth step is one line.
    """
    drawn = _curve(tmp_path / "a", [1.0 if step < 60 else math.nan for step in range(1, 101)])[
        "loss"
    ]
    assert np.isnan(drawn.values).sum() == 41
    assert list(drawn.nonfinite) == list(range(60, 101))
    drawn = _curve(tmp_path / "b", [2.0 if step % 10 == 0 else None for step in range(1, 101)])[
        "loss"
    ]
    assert (len(drawn.values), len(drawn.nonfinite)) == (10, 0)
    drawn = _curve(tmp_path / "c", [1.0, math.inf, 2.0])["loss"]  # which would stretch the axis
    assert (list(drawn.nonfinite), len(drawn.finite)) == ([2.0], 2)


def test_a_stretch_is_its_mean_between_its_least_and_most(tmp_path):
    """Of two steps each the line shows the mean, the band both, and what waits for data is a
    share of their time.
    """
    found = _curve(tmp_path / "ring", [1.0, 3.0, 5.0, 5.0, 2.0, 0.0], most=8, wait_seconds=0.05)
    assert list(found["loss"].values) == [1.0, 4.0, 3.5, 0.0]
    assert list(found["loss"].band.high) == [1.0, 5.0, 5.0, 0.0]
    assert list(found["wait_share"].values) == [0.5] * 4
