"""Learning-rate schedulers are driven by what really happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

from holdfast.core.errors import PolicyError
from holdfast.guard.run.schedules import advance, check_schedulers, needs_metric, validated


class Sensitive(lr_scheduler.LRScheduler):
    """A scheduler of a user's own whose step needs a metric."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, metric: float = None, *, again: bool = False) -> None:  # type: ignore[assignment,override]  # noqa: RUF013
        super().step()


class Demanding(Sensitive):
    """The same, without a default."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.seen: list[float] = []

    def _initial_step(self) -> None:
        self._step_count = 1
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, metric: float) -> None:  # type: ignore[override]
        self.seen.append(metric)
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


def plain() -> SGD:
    """Return an optimizer of two groups."""
    return SGD([{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in (0.1, 0.02)])


def test_a_skipped_step_advances_nothing_and_others_go_on():
    """Only the schedule of the optimizer that moved counts; two schedulers of one optimizer both do."""
    optimizers = {"a": plain(), "b": plain()}
    schedulers = {name: lr_scheduler.StepLR(each, 5) for name, each in optimizers.items()}
    schedulers |= {"more": lr_scheduler.ConstantLR(optimizers["b"], 0.5, 3)}
    optimizers["b"].step()
    advance(schedulers, optimizers, [])
    assert [each.last_epoch for each in schedulers.values()] == [0, 0, 0]
    advance(schedulers, optimizers, ["b"])
    assert [each.last_epoch for each in schedulers.values()] == [0, 1, 1]


def test_only_schedulers_that_need_a_metric_are_told_one_and_those_that_cut_are_named():
    """`advance` leaves ReduceLROnPlateau alone, `validated` leaves all others alone, and NaN moves nothing."""
    optimizer = plain()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.4, patience=1)
    demanding = Demanding(Adam([torch.nn.Parameter(torch.ones(1))], lr=0.4))
    schedulers = {"scheduler": plateau, "step": lr_scheduler.StepLR(optimizer, 1), "mine": demanding}
    assert [needs_metric(each) for each in schedulers.values()] == [True, False, True]
    assert not needs_metric(Sensitive(demanding.optimizer))
    optimizer.step()
    advance(schedulers, {"o": optimizer, "m": demanding.optimizer}, ["o", "m"])
    assert (plateau.last_epoch, schedulers["step"].last_epoch, demanding.seen) == (0, 1, [])
    assert validated(schedulers, torch.tensor(2.0)) == ["mine"]
    assert validated(schedulers, float("nan")) == []
    assert validated(schedulers, 2.5) == ["mine"]
    assert validated(schedulers, 2.5) == ["scheduler", "mine"]
    assert (plateau.last_epoch, plateau.best, demanding.seen) == (3, 2.0, [2.0, 2.5, 2.5])


def test_what_cannot_be_driven_is_refused_before_the_run_with_the_fix():
    """A metric scheduler inside ChainedScheduler is named."""
    optimizer = Adam([torch.nn.Parameter(torch.ones(1))], lr=0.4)
    chained = lr_scheduler.ChainedScheduler([Demanding(optimizer)])
    with pytest.raises(PolicyError, match=r"'warm' is a ChainedScheduler that holds a Demanding") as caught:
        check_schedulers({"warm": chained})
    assert caught.value.rule == "H105"
