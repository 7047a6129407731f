"""Gradients and updates are measured as they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from holdfast.learning.layers import Gradients, LayerObserver
from holdfast.learning.measurements import Measurements
from holdfast.learning.measures import sample_of


def step(layers: LayerObserver, optimizer: torch.optim.Optimizer) -> tuple[Gradients, int]:
    """Make a step, and return its gradients and the number of parameters that have changed."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients: list[Gradients] = []
    changed: list[int] = []
    measurements = Measurements()
    layers.measure_gradients(measurements, "optimizer", parameters, gradients.append)
    optimizer.step()
    layers.measure_update(measurements, changed.append)
    measurements.note_all()
    return gradients[0], changed[0]


def test_norms_and_the_relative_length_of_a_step_are_exact() -> None:
    """SGD moves a weight by lr x gradient, and the numbers say so."""
    weight = nn.Parameter(torch.full((10, 10), 2.0))
    layers = LayerObserver({id(weight): "weight"})
    weight.grad = torch.full((10, 10), 3.0)
    before, moved = step(layers, torch.optim.SGD([weight], lr=0.1))
    facts = layers.observations()["weight"]
    assert before.total_norm == pytest.approx(30)
    assert moved == 1
    assert facts.gradient_rms == pytest.approx(3)
    assert facts.first_weight_rms == pytest.approx(2)
    assert facts.ratio == facts.largest_ratio == pytest.approx(0.3 / 2)


def test_a_sparse_a_missing_and_a_zero_gradient_are_distinguished() -> None:
    """An embedding's stored rows count, a parameter without gradient does not, and zero is
    counted as zero.
    """
    table, idle, zero = (
        nn.Embedding(50, 4, sparse=True),
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3)),
    )
    table(torch.tensor([1, 1, 2])).sum().backward()
    zero.grad = torch.zeros(3)
    layers = LayerObserver({id(table.weight): "table", id(idle): "idle", id(zero): "zero"})
    before, _ = step(layers, torch.optim.SGD([table.weight, idle, zero], lr=0.1))
    assert before.tensors == 2
    assert before.total_norm == pytest.approx(math.sqrt(4 * 2**2 + 4 * 1))
    facts = layers.observations()
    assert [facts[name].with_gradient for name in ("table", "idle", "zero")] == [1, 0, 1]
    assert [facts[name].zero_gradient for name in ("table", "idle", "zero")] == [0, 0, 1]


def test_what_is_not_finite_is_named_and_kept_out_of_the_medians() -> None:
    """One NaN gradient is named, and spoils no statistic."""
    weight = nn.Parameter(torch.ones(2, 2))
    layers = LayerObserver({id(weight): "weight"})
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(2, 2)
    step(layers, optimizer)
    weight.grad = torch.full((2, 2), math.nan)
    before, _ = step(layers, optimizer)
    assert before.nonfinite == ["weight"]
    assert layers.observations()["weight"].gradient_rms == pytest.approx(1)
    assert layers.observations()["weight"].nonfinite


def test_a_sample_of_a_matrix_is_of_all_its_columns():
    """Digits have pixels that are always 0.

    A sample of their columns would say that the layer stands still.
    """
    weight = torch.arange(512 * 64).view(512, 64)
    assert len((sample_of(weight, 1024) % 64).unique()) == 64
    assert sample_of(weight, 1024).numel() <= 1024
