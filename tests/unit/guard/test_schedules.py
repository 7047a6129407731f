"""Learning-rate schedulers are driven by what really happened, and a factor on their rates stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from holdfast.core.errors import PolicyError
from holdfast.guard.run.schedules import advance, check_schedulers, needs_metric, scale, validated


class Steepness:
    """A callable object, whose state torch saves with the scheduler."""

    def __init__(self) -> None:
        self.power = 0.97

    def __call__(self, step: int) -> float:
        return self.power**step


class HandWritten(lr_scheduler.LRScheduler):
    """A warm-up by a user's own hand, with absolute rates under the usual names."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.warmup_start_lr = 1e-4
        self.min_lr = 2e-3
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        share = min(1.0, self.last_epoch / 9)
        rates = (self.warmup_start_lr + (base - self.warmup_start_lr) * share for base in self.base_lrs)
        return [max(rate / (1 + max(0, self.last_epoch - 9)), self.min_lr) for rate in rates]


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


def warmed_up_cosine(optimizer: Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.01, total_iters=4),
        lr_scheduler.CosineAnnealingLR(optimizer, 9, 1e-3),
    ]
    inner = lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 11, 0.5)])
    return lr_scheduler.ChainedScheduler([lr_scheduler.SequentialLR(optimizer, parts, [4]), inner])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 / (1 + n), Steepness()]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 5, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [4, 11], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.2, 12),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.01, 1.0, 14),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 18, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2, eta_min=1e-3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [1e-3, 2e-3], 0.1, 4, mode="triangular2"),
    "CyclicLR exp_range": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.1, 4, mode="exp_range", gamma=0.98),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.3], 30, pct_start=0.3),
    "OneCycleLR three phases": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, 30, three_phase=True, anneal_strategy="linear"
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 6), lr_scheduler.CosineAnnealingLR(o, 9, 1e-3)], [7]
    ),
    "ChainedScheduler, nested": warmed_up_cosine,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 9), lr_scheduler.StepLR(o, 4, 0.5)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(
        o, factor=0.4, patience=1, min_lr=[2e-3, 1e-3], eps=1.5e-3
    ),
    "SWALR": lambda o: SWALR(o, 0.002, anneal_epochs=9),
    "HandWritten": HandWritten,
}
METRICS = [3.0, 2.0, 2.5, 2.5, 2.5, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 0.5] + [0.6] * 17
STEPS = 25


class Run:
    """One optimizer of two groups under one scheduler."""

    def __init__(self, name: str, *, as_tensor: bool = False) -> None:
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        rates = [torch.tensor(rate, dtype=torch.float64) if as_tensor else rate for rate in (0.1, 0.02)]
        groups = [{"params": [weight], "lr": rate} for weight, rate in zip(weights, rates, strict=True)]
        self.optimizer: Optimizer = SGD(groups, momentum=0.9)
        self.optimizers = {"optimizer": self.optimizer}
        self.schedulers = {"scheduler": SCHEDULERS[name](self.optimizer)}
        self.weights = weights
        self.done = 0

    def steps(self, count: int) -> list[list[float]]:
        """Return the learning rates after each of so many steps."""
        seen = []
        for _ in range(count):
            for weight in self.weights:
                weight.grad = torch.ones(2)
            self.optimizer.step()
            advance(self.schedulers, self.optimizers, ["optimizer"])
            validated(self.schedulers, METRICS[self.done])
            self.done += 1
            seen.append(self.rates())
        return seen

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def scale(self, factor: float) -> None:
        scale(self.schedulers, self.optimizers, factor)

    def state(self) -> Any:
        return copy.deepcopy((self.optimizer.state_dict(), self.schedulers["scheduler"].state_dict(), self.done))

    def load(self, state: Any) -> None:
        optimizer, scheduler, self.done = copy.deepcopy(state)
        self.optimizer.load_state_dict(optimizer)
        self.schedulers["scheduler"].load_state_dict(scheduler)


def close(found: list[list[float]], expected: list[list[float]], factor: float) -> None:
    assert len(found) == len(expected)
    for step, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert here == pytest.approx([factor * rate for rate in there], rel=1e-9, abs=1e-18), f"step {step}"


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("at", [0, 1, 5, 8, 13])
def test_a_scaled_schedule_is_the_factor_times_the_unscaled_one_at_every_later_step(name, at):
    """Whatever the scheduler, wherever it is cut, twice in a row: each later rate is multiplied, and stays so."""
    plain, scaled = Run(name), Run(name)
    begin = plain.steps(at)
    scaled.steps(at)
    scaled.scale(0.3)
    assert scaled.schedulers["scheduler"].get_last_lr() == pytest.approx(scaled.rates())
    close([scaled.rates()], [plain.rates()], 0.3)
    middle = plain.steps(6)
    close(scaled.steps(6), middle, 0.3)
    scaled.scale(0.5)
    expected = plain.steps(STEPS - at - 6)
    close(scaled.steps(STEPS - at - 6), expected, 0.15)
    assert len({tuple(rates) for rates in begin + middle + expected}) > 1, "the test would show nothing"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_torch_saves_holds_the_factor_and_older_state_takes_it_back(name):
    """A new process goes on with the same rates, bit for bit; a rollback to before undoes the factor everywhere."""
    plain, run, resumed = Run(name), Run(name), Run(name)
    plain.steps(6)
    run.steps(6)
    before, live = run.state(), (run.optimizer.state_dict(), run.schedulers["scheduler"].state_dict())
    run.scale(0.3)
    assert str(live[1]) == str(before[1]), "a state_dict that somebody holds must not change"
    run.steps(2)
    resumed.load(run.state())
    assert resumed.steps(12) == run.steps(12)
    run.load(before)
    assert run.rates() == plain.rates()
    run.scale(0.5)
    close(run.steps(10), plain.steps(10), 0.5)


def test_a_skipped_step_advances_nothing_and_others_go_on():
    """Only the schedule of the optimizer that moved counts; two schedulers of one optimizer both do."""
    a, b = Run("StepLR"), Run("StepLR")
    optimizers = {"a": a.optimizer, "b": b.optimizer}
    schedulers = {
        "a": a.schedulers["scheduler"],
        "b": b.schedulers["scheduler"],
        "more": lr_scheduler.ConstantLR(b.optimizer, 0.5, 3),
    }
    b.optimizer.step()
    advance(schedulers, optimizers, [])
    assert [each.last_epoch for each in schedulers.values()] == [0, 0, 0]
    advance(schedulers, optimizers, ["b"])
    assert [each.last_epoch for each in schedulers.values()] == [0, 1, 1]


def test_only_schedulers_that_need_a_metric_are_told_one_and_those_that_cut_are_named():
    """`advance` leaves ReduceLROnPlateau alone, `validated` leaves all others alone, and NaN moves nothing."""
    run = Run("ReduceLROnPlateau")
    demanding = Demanding(Adam([torch.nn.Parameter(torch.ones(1))], lr=0.4))
    run.schedulers |= {"step": lr_scheduler.StepLR(run.optimizer, 1), "mine": demanding}
    plateau = run.schedulers["scheduler"]
    assert [needs_metric(each) for each in run.schedulers.values()] == [True, False, True]
    assert not needs_metric(Sensitive(demanding.optimizer))
    run.optimizer.step()
    advance(run.schedulers, {"o": run.optimizer, "m": demanding.optimizer}, ["o", "m"])
    assert (plateau.last_epoch, run.schedulers["step"].last_epoch, demanding.seen) == (0, 1, [])
    assert validated(run.schedulers, torch.tensor(2.0)) == ["mine"]
    assert validated(run.schedulers, float("nan")) == []
    assert validated(run.schedulers, 2.5) == ["mine"]
    assert validated(run.schedulers, 2.5) == ["scheduler", "mine"]
    assert (plateau.last_epoch, plateau.best, demanding.seen) == (3, 2.0, [2.0, 2.5, 2.5])


def test_what_cannot_be_driven_is_refused_before_the_run_with_the_fix():
    """A metric scheduler inside ChainedScheduler, and a foreign one where rates shall be multiplied, are named."""
    optimizer = Adam([torch.nn.Parameter(torch.ones(1))], lr=0.4)
    chained = lr_scheduler.ChainedScheduler([Demanding(optimizer)])
    with pytest.raises(PolicyError, match=r"'warm' is a ChainedScheduler that holds a Demanding") as caught:
        check_schedulers({"warm": chained}, scales=False)
    assert caught.value.rule == "H105"

    class Foreign:
        def step(self) -> None:
            """Do nothing."""

    check_schedulers({"foreign": Foreign()}, scales=False)
    with pytest.raises(PolicyError, match="LambdaLR"):
        check_schedulers({"foreign": Foreign()}, scales=True)
    check_schedulers(Run("ChainedScheduler, nested").schedulers, scales=True)


class Wrapped(Optimizer):
    """An optimizer around another one, as Accelerate's, with the parameter groups of the inner one."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)
