"""Averaged models, which are updated when the result of a late step is read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import assert_same, kinds_of, tensors_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.guard.run.undecided import UndecidedResult

AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "ema with buffers": lambda model: AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
    "swa": AveragedModel,
}


class Training:
    """A model with BatchNorm and dropout, its optimizer and its average."""

    def __init__(self, average: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.average = AVERAGES[average](self.model)

    def guard(self, run_dir: Path, decide: str, **settings: Any) -> holdfast.Guard:
        """Return a guard that saves nothing and reads no gradients for its diagnosis."""
        torch.manual_seed(1)
        return holdfast.Guard(
            run_dir,
            model=self.model,
            optimizer=self.optimizer,
            averaged=self.average,
            decide=decide,
            **{"save_interval_steps": None, "diagnose": False, "nonfinite_patience": None}
            | settings,
        )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).square().mean()

    def state(self) -> list[torch.Tensor]:
        """Return the weights, buffers, moments, average and random state."""
        average = [value.clone() for value in self.average.state_dict().values()]
        return [*tensors_of(self.model, self.optimizer), *average, torch.get_rng_state()]


def batches(bad: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Return 20 batches, some of which have a NaN."""
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(8, 6, generator=generator) for _ in range(20)]
    for index in bad:
        data[index][2, 3] = float("nan")
    return data


def trained(
    training: Training, run_dir: Path, decide: str, loss: Any, bad: tuple[int, ...] = (8, 19)
) -> tuple[list[torch.Tensor], int, list[str]]:
    """Train, and return the state, the number of late steps, and the kinds of events."""
    with training.guard(run_dir, decide) as guard:
        results = [guard.step(batch, loss) for batch in batches(bad)]
        late = sum(isinstance(result, UndecidedResult) for result in results)
        guard.statistics()
        return training.state(), late, kinds_of(guard)


@pytest.mark.parametrize("bad", [(), (8, 9, 19)], ids=str)
@pytest.mark.parametrize("average", AVERAGES)
def test_a_late_average_equals_one_that_is_updated_at_once(
    tmp_path: Path, average: str, bad: tuple[int, ...]
) -> None:
    """The average includes each accepted step with the buffers of that step, bit for bit."""
    now, late = Training(average), Training(average)

    expected, _, _ = trained(now, tmp_path / "now", "now", now.loss, bad)
    state, late_steps, kinds = trained(late, tmp_path / "late", "late", late.loss, bad)

    assert_same(state, expected)
    assert late_steps >= 15
    assert "decided_now" not in kinds


@pytest.mark.parametrize("first", [0, 9])
def test_a_loss_function_sees_an_average_of_all_steps_before(tmp_path: Path, first: int) -> None:
    """A loss that uses the average, from some step on, gets it with the last step included."""

    def loss_of(training: Training) -> Any:
        count = iter(range(100))

        def loss(batch: torch.Tensor) -> torch.Tensor:
            value = training.loss(batch)
            if next(count) < first:
                return value
            # In training mode, the teacher's running statistics change too.
            with torch.no_grad():
                target = training.average(batch)
            return value + (training.model(batch) - target).square().mean()

        return loss

    now, late = Training("ema"), Training("ema")

    expected, _, _ = trained(now, tmp_path / "now", "now", loss_of(now), ())
    state, late_steps, kinds = trained(late, tmp_path / "late", "late", loss_of(late), ())

    assert_same(state, expected)
    assert late_steps <= first
    assert "decided_now" in kinds


def test_a_refused_step_is_undone_before_the_loss_sees_the_average(tmp_path: Path) -> None:
    """If the loss uses the average while a refused step is undecided, it gets the right one."""

    def loss_of(training: Training) -> Any:
        def loss(batch: torch.Tensor) -> torch.Tensor:
            value = training.loss(batch)
            if batch[0, 0] != data[9][0, 0]:
                return value
            return value + training.average(batch).square().mean()

        return loss

    data = batches((8,))
    now, late = Training("ema"), Training("ema")

    expected, _, _ = trained(now, tmp_path / "now", "now", loss_of(now), (8,))
    state, _, _ = trained(late, tmp_path / "late", "late", loss_of(late), (8,))

    assert_same(state, expected)


def test_a_script_that_runs_the_average_between_steps_sees_the_last_step(tmp_path: Path) -> None:
    """Running an average, or a module in it, decides the step that it must include."""
    outputs: dict[str, list[torch.Tensor]] = {"now": [], "late": []}
    for decide, found in outputs.items():
        training = Training("ema")
        training.average.eval()
        with training.guard(tmp_path / decide, decide) as guard:
            for number, batch in enumerate(batches((8,))):
                guard.step(batch, training.loss)
                if number % 4 == 0:
                    found.append(training.average(batches()[0]).detach())
                elif number % 4 == 1:
                    found.append(training.average.module[0](batches()[0]).detach())

    assert_same(outputs["late"], outputs["now"])


def test_averaged_holds_the_average_of_all_steps(tmp_path: Path) -> None:
    """`averaged()` decides the last step first."""
    weights: dict[str, list[torch.Tensor]] = {"now": [], "late": []}
    for decide, found in weights.items():
        training = Training("ema with buffers")
        with training.guard(tmp_path / decide, decide) as guard:
            for number, batch in enumerate(batches((8,))):
                guard.step(batch, training.loss)
                if number in (7, 8, 12):
                    with guard.averaged():
                        found.extend(
                            value.clone() for value in training.model.state_dict().values()
                        )

    assert_same(weights["late"], weights["now"])


def test_an_average_can_still_be_copied_and_pickled(tmp_path: Path) -> None:
    """A copy of the average is an ordinary module that knows no guard."""
    training = Training("ema")
    with training.guard(tmp_path, "late") as guard:
        for batch in batches():
            guard.step(batch, training.loss)
        guard.statistics()

        duplicates = [
            copy.deepcopy(training.average.module),
            pickle.loads(pickle.dumps(training.average.module)),
        ]
        guard.step(batches()[0], training.loss)
        for duplicate in duplicates:
            duplicate(batches()[0])

        assert guard._steps.is_settled is False
