"""The benchmark of live bytes is right itself: jobs really train, and truth is added up."""

from __future__ import annotations

import pytest
from benchmarks.forecast_live import row_of
from benchmarks.forecast_models import MODELS


@pytest.mark.slow
@pytest.mark.parametrize(("name", "percent"), [("mlp", 0.01), ("resnet", 2), ("lstm", 3)])
def test_forecasts_are_those_of_the_real_allocator(name: str, percent: float) -> None:
    """Two training steps peak as forecast, scratch of operations included: exact without convolutions and LSTMs."""
    row = row_of(next(model for model in MODELS if model.name == name))
    assert not row.failed
    assert row.error_percent is not None
    assert abs(row.error_percent) <= percent
