"""What a model is given: NaN and Inf are counted, and the scale is measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from holdfast.learning.inputs import InputObserver
from holdfast.learning.measurements import Measurements
from holdfast.learning.observations import ObservedInput


def after(*batches: Any) -> ObservedInput:
    inputs = InputObserver()
    measurements = Measurements()
    for batch in batches:
        inputs.measure_arguments(measurements, batch)
    measurements.note_all()
    return inputs.observations()


@pytest.mark.parametrize(("value", "bad"), [(math.nan, 1), (math.inf, 1), (-math.inf, 0), (0.0, 0)])
def test_masks_of_minus_infinity_are_not_bad(value: float, bad: int) -> None:
    """NaN and plus infinity in an input are counted, the minus infinity of a mask is not."""
    batch = torch.randn(4, 3)
    batch[1, 1] = value

    assert after(batch).nonfinite == bad


def test_the_scale_is_that_of_the_largest_tensor_of_numbers() -> None:
    """Token ids have no scale, and neither has a tensor that was computed."""
    images = torch.full((8, 3, 4), 100.0)
    images[:, 0] = 200.0
    batch = {
        "ids": torch.arange(800).view(8, 100),
        "images": images,
        "embedded": torch.randn(8, 100, requires_grad=True),
    }

    observed = after(batch, batch)

    assert observed.largest == 200.0
    assert observed.offset == pytest.approx(133.333 / 47.14, rel=1e-3)
    assert (observed.calls, observed.examined, observed.flat) == (2, 2, 0)


def test_a_batch_of_a_single_value_is_flat() -> None:
    """Its offset is infinite, and the rules do not take it for a scale."""
    observed = after(torch.ones(8, 3))

    assert observed.flat == 1
