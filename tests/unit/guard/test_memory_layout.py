"""State lies in memory after a resume as it lay before, which fused optimizers go by.

Expanded tensors load.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import events
from torch import nn

import holdfast

pytestmark = pytest.mark.usefixtures("unchecked_splits")


class Turned(nn.Module):
    """A weight that lies column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.flatten(1)[:, :4] @ self.weight


def convolution() -> nn.Module:
    return nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, fused=True, amsgrad=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


State = list[tuple[torch.Tensor, tuple[int, ...]]]
MODELS = [convolution, Turned]
OPTIMIZERS = [adam, sgd]


class Process:
    """One process of a run."""

    def __init__(
        self, run_dir: Path, make_model: Callable[[], nn.Module], make_optimizer: Any, **policy: Any
    ):
        torch.manual_seed(3)
        data = torch.randn(24, 3, 4, 4).unbind()
        self.model = make_model()
        self.optimizer = make_optimizer(self.model.parameters())
        loader = holdfast.DataLoader(data, batch_size=4, shuffle=True)
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "loader": loader}
        self.guard = holdfast.Guard(run_dir, **parts, **policy)

    def train(self, steps: int) -> None:
        for batch in self.guard.batches(max_steps=steps):
            self.guard.step(batch, lambda x: self.model(x).square().mean())

    def train_until_a_rollback(self, *, bad_at_step: int) -> State:
        for batch in self.guard.batches(max_steps=bad_at_step + 1):
            factor = float("nan") if self.guard.global_step == bad_at_step else 1.0
            result = self.guard.step(
                batch, lambda x, factor=factor: self.model(x).square().mean() * factor
            )
            if "rolled back" in (result.reason or ""):
                break
        return self.state()

    def state(self) -> State:
        tensors = list(self.model.state_dict().values())
        tensors += [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if value is not None
        ]
        return [(tensor.detach().clone(), tensor.stride()) for tensor in tensors]


def assert_same(one: State, two: State) -> None:
    assert len(one) == len(two)
    for (value, stride), (other, other_stride) in zip(one, two, strict=True):
        assert stride == other_stride
        assert torch.equal(value, other)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make_model", MODELS)
def test_a_resumed_run_goes_on_with_the_same_bits_and_strides(
    make_model: Callable[[], nn.Module], make_optimizer: Any, tmp_path: Path
) -> None:
    """Moments of channels_last and transposed weights lie as before.

    A fused optimizer goes on bit for bit.
    """
    undisturbed = Process(tmp_path / "undisturbed", make_model, make_optimizer)
    undisturbed.train(9)
    Process(tmp_path / "run", make_model, make_optimizer).train(4)
    again = Process(tmp_path / "run", make_model, make_optimizer)
    assert again.guard.global_step == 4
    assert any(
        not value.is_contiguous()
        for state in again.optimizer.state.values()
        for value in state.values()
    )
    again.train(9)
    assert_same(again.state(), undisturbed.state())


@pytest.mark.parametrize("snapshot_interval_steps", [None, 3], ids=["checkpoint", "host"])
@pytest.mark.parametrize("make_model", MODELS)
def test_a_rollback_keeps_the_strides(
    make_model: Callable[[], nn.Module], snapshot_interval_steps: int | None, tmp_path: Path
) -> None:
    """After a rollback, in the first process and in a resumed one, bits and strides are those of
    that step.
    """
    policy: dict[str, Any] = {
        "save_interval_steps": 3,
        "async_save": False,
        "nonfinite_patience": 1,
        "snapshot_interval_steps": snapshot_interval_steps,
    }
    expected = Process(tmp_path / "expected", make_model, adam)
    expected.train(3)
    for _ in range(2):
        process = Process(tmp_path / "run", make_model, adam, **policy)
        assert_same(process.train_until_a_rollback(bad_at_step=5), expected.state())
        process.guard.close()


class Masked(nn.Module):
    """A mask that is expanded, beside the scalar that it is a view of.

    Another one is replaced by dense values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale: torch.Tensor
        self.register_buffer("mask", torch.ones(1, 1).expand(4, 4))
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.register_buffer("scales", self.scale.expand(3))
        self.register_buffer("late", torch.zeros(1).expand(4))
        self.frozen = nn.Parameter(torch.full((1,), 2.0).expand(4), requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale.mul_(0.75)
            self.late = self.late + torch.arange(4.0)
        return (self.layer(batch) @ self.mask + self.late) * self.scale * self.frozen


def masked_run(run_dir: Path, steps: int, *bad_at: int) -> tuple[holdfast.Guard, Masked, list[str]]:
    torch.manual_seed(5)
    model = Masked()
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=torch.optim.Adam(model.layer.parameters()),
        loader=holdfast.DataLoader(torch.randn(40, 4).unbind(), batch_size=4),
        save_interval_steps=2,
        async_save=False,
        nonfinite_patience=1,
        snapshot_interval_steps=None,
    )
    reasons = []
    for number, batch in enumerate(guard.batches(max_steps=steps)):
        factor = float("nan") if number in bad_at else 1.0
        result = guard.step(batch, lambda x, factor=factor: model(x).square().mean() * factor)
        reasons.append(result.reason or "")
    return guard, model, reasons


def test_a_run_with_expanded_buffers_resumes(tmp_path: Path) -> None:
    """Expanded buffers and parameters are saved, load again, stay views of the same memory, and
    train equally.
    """
    _, expected, _ = masked_run(tmp_path / "undisturbed", 9)
    masked_run(tmp_path / "run", 4)
    guard, model, _ = masked_run(tmp_path / "run", 9)
    assert guard.resumed_from is not None
    assert events(guard, "resumed")
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model.scales.data_ptr() == model.scale.data_ptr()
    assert model.mask.stride() == (0, 0)
    assert model.late.unique().numel() == 4


@pytest.mark.parametrize("bad_at", [0, 3])
def test_a_step_with_expanded_buffers_is_taken_back(bad_at: int, tmp_path: Path) -> None:
    """In the first step and later.

    It leaves no trace, and a rollback in place restores every buffer.
    """
    guard, model, reasons = masked_run(tmp_path, 5, bad_at)
    assert "rolled back" in reasons[bad_at]
    assert sum("rolled back" in reason for reason in reasons) == 1
    assert guard.global_step == 5
    assert float(model.scale) == pytest.approx(0.5 * 0.75**5)
    assert torch.equal(model.late, 5 * torch.arange(4.0))
    assert model.scales.data_ptr() == model.scale.data_ptr()
