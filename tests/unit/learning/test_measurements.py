"""Measurements reach the host together, in order, and only if their step counts."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.learning.measurements import Measurements


def noted(*, copies_early: bool) -> list[object]:
    """Return what is noted of measurements with several dtypes and shapes."""
    values: list[object] = []

    def note(name: str, *tensors: Tensor) -> None:
        values.append((name, [tensor.tolist() for tensor in tensors]))

    measurements = Measurements()
    measurements.add(lambda *tensors: note("norms", *tensors), torch.ones(()), torch.zeros(2, 1))
    measurements.add(lambda: note("a call"))
    measurements.add(lambda labels: note("labels", labels), torch.tensor([7, 2**60 + 1]))
    measurements.add(
        lambda *tensors: note("mixed", *tensors),
        torch.tensor(True),
        torch.tensor(1e300, dtype=torch.float64),
        torch.tensor([3.0]),
    )
    if copies_early:
        measurements.start_copy()
    measurements.note_all()
    return values


def test_values_keep_their_order_shape_and_precision() -> None:
    """Tensors of one dtype are copied together, and come back exactly as they were."""
    expected = [
        ("norms", [1.0, [[0.0], [0.0]]]),
        ("a call", []),
        ("labels", [[7, 2**60 + 1]]),
        ("mixed", [True, 1e300, [3.0]]),
    ]

    assert noted(copies_early=False) == expected
    assert noted(copies_early=True) == expected


def test_a_measurement_is_noted_once() -> None:
    """After they were noted, nothing is left, and new measurements can be added."""
    calls: list[float] = []
    measurements = Measurements()
    measurements.add(lambda value: calls.append(float(value)), torch.tensor(1.0))
    measurements.note_all()
    measurements.note_all()
    measurements.add(lambda value: calls.append(float(value)), torch.tensor(2.0))
    measurements.note_all()

    assert calls == [1.0, 2.0]


def test_a_measurement_after_the_copies_have_started_is_dropped() -> None:
    """The hook of a loss whose backward runs again later finds that its step is over."""
    calls: list[float] = []
    measurements = Measurements()
    measurements.add(lambda value: calls.append(float(value)), torch.tensor(1.0))
    measurements.start_copy()
    measurements.add(lambda value: calls.append(float(value)), torch.tensor(2.0))
    measurements.note_all()

    assert calls == [1.0]
