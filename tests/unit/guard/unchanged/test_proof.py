"""The boundaries of a resumed script are compared with those of its earlier attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.guard.unchanged.proof import BoundaryLog, describe_boundary
from holdfast.loader.random_state import capture


def boundary(**changes: Any) -> dict[str, Any]:
    """Return a boundary, in which some values may be others."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=changes.get("lr", 0.1))
    torch.manual_seed(changes.get("seed", 0))
    batch = {"inputs": torch.full((4, 3), changes.get("value", 1.0)), "name": "a"}
    variables = {"step": changes.get("step", 3), "text": "no number"}
    return describe_boundary([batch, 2], capture(), {"optimizer": optimizer}, variables)


def test_equal_boundaries_are_counted(tmp_path: Path) -> None:
    """Boundaries that are equal to the recorded ones are counted, and the rest are recorded."""
    BoundaryLog(tmp_path, None).note(5, boundary())
    resumed = BoundaryLog(tmp_path, 4)

    assert resumed.note(5, boundary()) is None
    assert resumed.note(6, boundary(value=2.0)) is None
    assert resumed.equal_boundaries == 1
    assert resumed.is_complete


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"lr": 0.2}, "lr"),
        ({"seed": 1}, "random"),
        ({"value": 2.0}, "batch"),
        ({"step": 4}, "step"),
    ],
)
def test_difference_is_named(change: dict[str, Any], name: str, tmp_path: Path) -> None:
    """A learning rate, random state, batch or counter that differs is named."""
    BoundaryLog(tmp_path, None).note(5, boundary())

    difference = BoundaryLog(tmp_path, 4).note(5, boundary(**change))

    assert difference is not None
    assert name in difference


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([1.0 + 2.0j]).conj(),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(),
    ],
)
def test_tensors_that_numpy_cannot_view_are_compared(tensor: torch.Tensor, tmp_path: Path) -> None:
    """Batches of bf16, lazy conjugates and transposed tensors are compared by their values."""

    def boundary_with(batch: torch.Tensor) -> dict[str, Any]:
        return {**boundary(), **describe_boundary(batch, capture(), {}, {})}

    BoundaryLog(tmp_path, None).note(5, boundary_with(tensor))

    assert BoundaryLog(tmp_path, 4).note(5, boundary_with(tensor.clone())) is None
    assert BoundaryLog(tmp_path, 4).note(5, boundary_with(tensor * 2)) is not None


def test_each_draw_of_numpy_is_noticed(tmp_path: Path) -> None:
    """One more number from NumPy's global generator is a difference in the random state."""
    np.random.seed(0)
    np.random.rand()
    BoundaryLog(tmp_path, None).note(5, describe_boundary(None, capture(), {}, {}))

    np.random.rand()
    difference = BoundaryLog(tmp_path, 4).note(5, describe_boundary(None, capture(), {}, {}))

    assert difference is not None
    assert "random" in difference


def test_second_normal_number_of_numpy_is_noticed(tmp_path: Path) -> None:
    """NumPy draws normal numbers in pairs, and the second one belongs to its state."""
    np.random.seed(1)
    np.random.randn()
    BoundaryLog(tmp_path, None).note(5, describe_boundary(None, capture(), {}, {}))

    np.random.randn()
    difference = BoundaryLog(tmp_path, 4).note(5, describe_boundary(None, capture(), {}, {}))

    assert difference is not None
    assert "random" in difference


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batch_that_has_no_dense_memory_is_not_compared(tmp_path: Path) -> None:
    """A nested tensor in a batch is left out instead of ending the recording with an error."""
    batch = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    BoundaryLog(tmp_path, None).note(5, describe_boundary(batch, capture(), {}, {}))

    again = BoundaryLog(tmp_path, 4).note(5, describe_boundary(batch, capture(), {}, {}))

    assert again is None


def test_boundaries_before_the_checkpoint_are_not_compared(tmp_path: Path) -> None:
    """Only steps after the checkpoint are repeated."""
    BoundaryLog(tmp_path, None).note(5, boundary())

    resumed = BoundaryLog(tmp_path, 5)

    assert resumed.note(5, boundary(value=2.0)) is None
    assert resumed.equal_boundaries == 0


def test_run_from_the_beginning_is_compared_with_nothing(tmp_path: Path) -> None:
    """Without a checkpoint, the random numbers of an unseeded script are others."""
    BoundaryLog(tmp_path, None).note(5, boundary())

    again = BoundaryLog(tmp_path, None)

    assert again.note(5, boundary(value=3.0)) is None
