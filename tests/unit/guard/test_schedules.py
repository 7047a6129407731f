"""Learning-rate schedulers are driven by what really happened, whichever library they come from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import square_of
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

import holdfast
from holdfast.core.errors import PolicyError
from holdfast.guard.scheduler_interface import Interface, interface_of
from holdfast.guard.schedules import Schedules

NAN = float("nan")


class Sensitive(lr_scheduler.LRScheduler):
    """A scheduler of a user's own whose step may be given a metric."""

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
    return SGD(
        [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in (0.1, 0.02)]
    )


def schedules_of(
    schedulers: dict[str, Any], optimizers: dict[str, Any], interval: str | None = "step"
) -> Schedules:
    return Schedules(schedulers, optimizers, interval, has_epochs=True)


def test_a_skipped_step_advances_nothing_and_others_go_on():
    """Only the schedule of the optimizer that moved counts.

    Two schedulers of one optimizer both do.
    """
    optimizers = {"a": plain(), "b": plain()}
    schedulers = {name: lr_scheduler.StepLR(each, 5) for name, each in optimizers.items()}
    schedulers |= {"more": lr_scheduler.ConstantLR(optimizers["b"], 0.5, 3)}
    schedules = schedules_of(schedulers, optimizers)
    optimizers["b"].step()
    schedules.after_step([])
    assert [each.last_epoch for each in schedulers.values()] == [0, 0, 0]
    schedules.after_step(["b"])
    assert [each.last_epoch for each in schedulers.values()] == [0, 1, 1]


def test_only_schedulers_that_need_a_metric_are_told_one_and_those_that_cut_are_named():
    """A step leaves ReduceLROnPlateau alone, a metric leaves all others alone, and NaN moves
    nothing.
    """
    optimizer = plain()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.4, patience=1)
    demanding = Demanding(Adam([torch.nn.Parameter(torch.ones(1))], lr=0.4))
    schedulers = {
        "scheduler": plateau,
        "step": lr_scheduler.StepLR(optimizer, 1),
        "mine": demanding,
    }
    assert [interface_of(each) for each in schedulers.values()] == [
        Interface.METRIC,
        Interface.STEP,
        Interface.METRIC,
    ]
    assert interface_of(Sensitive(demanding.optimizer)) is Interface.STEP
    schedules = schedules_of(schedulers, {"o": optimizer, "m": demanding.optimizer})
    optimizer.step()
    schedules.after_step(["o", "m"])
    assert (plateau.last_epoch, schedulers["step"].last_epoch, demanding.seen) == (0, 1, [])
    assert schedules.validated(torch.tensor(2.0), "min", 1) == ["mine"]
    assert schedules.validated(NAN, "min", 1) == []
    assert schedules.validated(2.5, "min", 1) == ["mine"]
    assert schedules.validated(2.5, "max", 1) == ["mine"]
    assert schedules.validated(2.5, "min", 1) == ["scheduler", "mine"]
    assert (plateau.last_epoch, plateau.best) == (3, 2.0)


# --- schedulers of other libraries


class Counting:
    """A scheduler that is no torch LRScheduler: the rate is 1 more after each step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.n = 0

    def step(self) -> None:
        self.n += 1
        self.optimizer.param_groups[0]["lr"] = 1.0 + self.n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


class Around:
    """A wrapper that forwards everything it does not know, as loggers do."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class UnusedEpoch(Counting):
    """As LRScheduler.step(epoch=None)."""

    def step(self, epoch: int | None = None) -> None:
        assert epoch is None
        super().step()


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function in the careless way, without functools.wraps."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class Decorated(Counting):
    """Its signature is hidden."""

    step = logged(Counting.step)


class Partial(Counting):
    """Its step is no method."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.step = functools.partial(advance, self, by=1)  # type: ignore[method-assign]


def advance(counting: Counting, by: int) -> None:
    counting.n += by
    counting.optimizer.param_groups[0]["lr"] = 1.0 + counting.n


class Closed:
    """It knows its optimizer by a closure only."""

    def __init__(self, optimizer: Optimizer) -> None:
        counting = Counting(optimizer)
        self.step = lambda: counting.step()
        self.state_dict = lambda: counting.state_dict()
        self.load_state_dict = lambda state: counting.load_state_dict(state)


KINDS = [
    Counting,
    UnusedEpoch,
    Decorated,
    Partial,
    Closed,
    lambda optimizer: Around(Counting(optimizer)),
]


def rates_of(
    run: Path,
    make: Callable[[Optimizer], Any],
    batches: list[torch.Tensor],
    steps: int,
    **settings: Any,
) -> list[float]:
    """Train up to so many steps of a run, and return the rate at the beginning of each."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = make(optimizer)
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, scheduler=scheduler, loader=batches, **settings
    )
    rates = []
    for batch in guard.batches(max_steps=steps):
        rates.append(optimizer.param_groups[0]["lr"])
        guard.step(batch, square_of(model))
    return [*rates, optimizer.param_groups[0]["lr"]]


SMALL = [torch.full((2, 2), 1e-3) for _ in range(4)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_steps_without_an_argument_is_stepped_after_each_committed_step(tmp_path, kind):
    """A batch of NaN is no step of the schedule, and a resume goes on where it was."""
    batches = [SMALL[0], torch.full((2, 2), NAN), *SMALL[2:]]
    assert rates_of(tmp_path / "a", kind, batches, 4) == [1.0, 2.0, 2.0, 3.0, 4.0, 5.0]
    assert rates_of(tmp_path / "b", kind, batches, 2) == [1.0, 2.0, 2.0, 3.0]
    assert rates_of(tmp_path / "b", kind, batches, 4) == [3.0, 4.0, 5.0]


def test_what_steps_without_an_argument_may_count_epochs(tmp_path):
    """The policy says so, as for torch's own."""
    found = rates_of(tmp_path, Counting, SMALL[:2], 5, scheduler_interval="epoch")
    assert found == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("kind", [Counting, object])
def test_without_an_interval_the_caller_drives_a_scheduler_of_any_kind(tmp_path, kind):
    """None means never: nothing is stepped, and nothing is refused."""

    class Called(Counting):
        step = None if kind is object else Counting.step  # type: ignore[assignment]

    assert rates_of(tmp_path, Called, SMALL, 3, scheduler_interval=None) == [1.0] * 4


class Calls:
    """A scheduler as timm's: stateless functions of numbers that the loop passes in."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.calls: list[Any] = []

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.calls.append(("epoch", epoch))

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.calls.append(num_updates)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": list(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = list(state["calls"])


class Keyword(Calls):
    """It takes its numbers by name only."""

    def step(self, *, epoch: int) -> None:  # type: ignore[override]
        super().step(epoch)

    def step_update(self, **numbers: int) -> None:  # type: ignore[override]
        super().step_update(numbers["num_updates"])


class OtherName(Calls):
    """It takes its number under another name, and needs none for an epoch."""

    def step(self) -> None:  # type: ignore[override]
        super().step(len([call for call in self.calls if isinstance(call, tuple)]) + 1)

    def step_update(self, n: int) -> None:  # type: ignore[override]
        super().step_update(n)


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize(
    "kind", [Calls, Keyword, OtherName, lambda optimizer: Around(Calls(optimizer))]
)
def test_timm_schedulers_are_called_as_timm_does(tmp_path, kind, interval):
    """With the number of each update and of each epoch.

    Over a skip and a resume no number is lost or twice.
    """
    batches = [SMALL[0], torch.full((2, 2), NAN), *SMALL[2:]]
    for steps in (2, 7):
        made: list[Any] = []

        def make(optimizer: Optimizer, made: list[Any] = made) -> Any:
            made.append(kind(optimizer))
            return made[0]

        rates_of(tmp_path, make, batches, steps, scheduler_interval=interval)
    assert made[0].calls == [1, 2, 3, ("epoch", 1), 4, 5, 6, ("epoch", 2), 7]


def test_each_schedule_counts_the_updates_of_its_own_optimizer(tmp_path):
    """Two optimizers that are stepped in turn have a number of updates each, also after a
    resume.
    """
    for steps in (3, 6):
        models = {"g": nn.Linear(2, 1), "d": nn.Linear(2, 1)}
        optimizers = {name: SGD(model.parameters(), lr=0.1) for name, model in models.items()}
        schedulers = {name: Calls(optimizer) for name, optimizer in optimizers.items()}
        parts = {"model": models, "optimizer": optimizers, "scheduler": schedulers}
        guard = holdfast.Guard(tmp_path, loader=SMALL * 2, **parts)
        for batch in guard.batches(max_steps=steps):
            name = "g" if guard.global_step % 3 == 0 else "d"
            guard.step(batch, square_of(models[name]), optimizer=name)
    assert {name: scheduler.calls for name, scheduler in schedulers.items()} == {
        "g": [1, 2],
        "d": [1, 2, 3, 4],
    }


class Plateau(Calls):
    """As timm's PlateauLRScheduler, whose own state_dict forgets how long it has waited."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.lr_scheduler = lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", factor=0.5, patience=2
        )
        self.metrics = 0

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.calls.append((epoch, metric))
        if metric is not None:
            self.metrics += 1
            self.lr_scheduler.step(metric)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.lr_scheduler.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lr_scheduler.best = state["best"]


def test_a_plateau_of_timm_gets_the_metric_of_its_mode_and_keeps_its_patience_over_a_resume(
    tmp_path,
):
    """The rate is cut after the third validation that is no better, in whichever process that
    is.
    """
    rates = []
    for epochs in (1, 2, 3, 4):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=1.0)
        scheduler = Plateau(optimizer)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        guard = holdfast.Guard(tmp_path, loader=SMALL, **parts)
        for batch in guard.batches(max_epochs=epochs):
            guard.step(batch, square_of(model))
        guard.validated(3.0)
        guard.validated(0.5, name="accuracy", mode="max")
        guard.close()
        rates.append(optimizer.param_groups[0]["lr"])
        assert scheduler.calls[-1] == (epochs, 0.5)
        assert scheduler.metrics == epochs
    assert rates == [1.0, 1.0, 1.0, 0.5]


class Patient(Counting):
    """A plateau whose step does nothing without a metric."""

    mode = "min"

    def step(self, val_loss: float | None = None) -> None:
        if val_loss is not None:
            super().step()


def test_a_plateau_whose_metric_is_optional_gets_one(tmp_path):
    """Called without an argument it would never cut the rate, and nothing would say so."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = Patient(optimizer)
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)

    guard.step(torch.ones(2, 2), lambda x: model(x).square().mean())
    guard.validated(0.5)

    assert scheduler.n == 1


class Forgetful(Counting):
    """It saves nothing of what it counts."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(("kind", "warnings"), [(Forgetful, 1), (Counting, 0)])
def test_a_scheduler_that_does_not_save_what_it_counts_is_named(tmp_path, kind, warnings):
    """A resume would begin its rates anew."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    loader = [torch.ones(2, 2) * 0.001] * 3
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=optimizer, scheduler=kind(optimizer), loader=loader
    )

    for batch in guard.batches(max_epochs=2):
        guard.step(batch, lambda x: model(x).square().mean())

    reasons = [event.data["why"] for event in guard.events() if event.kind == "resume_may_differ"]
    assert len(reasons) == warnings
    assert all("'scheduler'" in why for why in reasons)


# --- which optimizer


class Blind(Counting):
    """It is told the rates by callbacks, and refers to no optimizer."""

    def __init__(self) -> None:
        self.n = 0

    def step(self) -> None:
        self.n += 1


def two_optimizers() -> dict[str, Any]:
    return {"g": plain(), "d": plain()}


class HoldsScheduler:
    """State of a script that saves a scheduler itself."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)


@pytest.mark.parametrize(
    ("passed", "reports"),
    [
        (lambda scheduler: {}, 1),
        (lambda scheduler: {"scheduler": scheduler}, 0),
        (lambda scheduler: {"scheduler": lr_scheduler.ChainedScheduler([scheduler])}, 0),
        (lambda scheduler: {"state": {"mine": HoldsScheduler(scheduler)}}, 0),
    ],
)
def test_a_scheduler_that_no_checkpoint_holds_is_reported_once(tmp_path, passed, reports):
    """A resume would start it from its first step, so the guard says so before training."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    data = [torch.ones(4, 2)] * 3
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=optimizer, loader=data, **passed(scheduler)
    )

    for epochs in (1, 2):
        for batch in guard.batches(max_epochs=epochs):
            guard.step(batch, square_of(model))

    kinds = [event.kind for event in guard.events()]
    assert kinds.count("resume_may_differ") == reports


def test_the_optimizer_of_a_scheduler_is_found_by_reference_or_by_name():
    """Through attributes, wrappers and wrapped optimizers; else its name decides."""
    optimizers = two_optimizers()
    wrapped = Wrapping(optimizers["d"])
    schedulers = {
        "attribute": Counting(optimizers["g"]),
        "wrapper": Around(Around(Counting(optimizers["g"]))),
        "inner optimizer": Counting(wrapped),
        "d": Blind(),
    }
    schedules = schedules_of(schedulers, optimizers)
    schedules.after_step(["g"])
    assert [scheduler.n for scheduler in schedulers.values()] == [1, 1, 0, 0]
    schedules.after_step(["d"])
    assert [scheduler.n for scheduler in schedulers.values()] == [1, 1, 1, 1]


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state


class Both(Blind):
    """It drives two optimizers."""

    def __init__(self, optimizers: dict[str, Any]) -> None:
        super().__init__()
        self.optimizers = list(optimizers.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizers: {"mine": Blind()},
        lambda optimizers: {"mine": Both(optimizers)},
        lambda optimizers: {"mine": Counting(plain())},
        lambda optimizers: {"g": lr_scheduler.StepLR(plain(), 5)},
        lambda optimizers: dict.fromkeys(["a", "b"], lr_scheduler.StepLR(optimizers["g"], 5)),
        lambda optimizers: beside_its_wrapper(optimizers["g"]),
    ],
)
def test_a_scheduler_whose_steps_nobody_could_count_is_refused(tmp_path, make):
    """It refers to none or to two of several optimizers, to another one, or would be advanced
    twice.
    """
    models = {"g": nn.Linear(2, 1), "d": nn.Linear(2, 1)}
    optimizers = {name: SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    with pytest.raises(PolicyError) as caught:
        holdfast.Guard(
            tmp_path / "run", model=models, optimizer=optimizers, scheduler=make(optimizers)
        )
    assert caught.value.rule == "H105"
    assert not (tmp_path / "run").exists()


def beside_its_wrapper(optimizer: Optimizer) -> dict[str, Any]:
    warm = lr_scheduler.ConstantLR(optimizer, 0.5, 3)
    return {
        "warm": warm,
        "all": lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.StepLR(optimizer, 5)], [3]),
    }


# --- refused


class Callback(Blind):
    """A callback, as those of pytorch-ignite."""

    step = None  # type: ignore[assignment]

    def __call__(self, engine: Any) -> None: ...


class Dampening(Callback):
    """A factor on the rate, as pytorch_warmup's."""

    def dampen(self, step: int | None = None) -> None: ...


class ByEpoch(Blind):
    """It needs the epoch, and nothing says that it is one of timm's."""

    def step(self, epoch: int) -> None: ...  # type: ignore[override]


class ByInterval(Blind):
    """The name of its argument contains that of a metric, and it needs none."""

    def step(self, interval: int) -> None: ...  # type: ignore[override]


class HiddenEpoch(Blind):
    """The same, behind a decorator."""

    step = logged(ByEpoch.step)


class TwoArguments(Blind):
    """It needs more than a guard knows."""

    def step(self, epoch: int, loss: float) -> None: ...  # type: ignore[override]


class WithoutState(Blind):
    """It could not be resumed."""

    load_state_dict = None  # type: ignore[assignment]


class Unready(Blind):
    """Its state is there later."""

    def state_dict(self) -> Any:
        raise KeyError("base_values")


class Unsaveable(Blind):
    """Its state needs pickle."""

    def state_dict(self) -> Any:
        return {"function": lambda x: x}


def plateau_inside(optimizer: Optimizer) -> Any:
    """Return a warm-up that hands over to a scheduler which needs a metric."""
    warmup = Blind()
    warmup.after_scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)  # type: ignore[attr-defined]
    return warmup


class EpochOnly(Plateau):
    """Its plateau can never get a metric."""

    def step(self, epoch: int) -> None:  # type: ignore[override]
        super().step(epoch)


REFUSED: dict[str, tuple[Callable[[Optimizer], Any], str]] = {
    "callable": (lambda optimizer: Callback(), "H105"),
    "dampening": (lambda optimizer: Dampening(), "H105"),
    "step(epoch)": (lambda optimizer: ByEpoch(), "H105"),
    "step(interval)": (lambda optimizer: ByInterval(), "H105"),
    "step(epoch), hidden": (lambda optimizer: HiddenEpoch(), "H105"),
    "two arguments": (lambda optimizer: TwoArguments(), "H105"),
    "no state": (lambda optimizer: WithoutState(), "H105"),
    "no state yet": (lambda optimizer: Unready(), "H105"),
    "a class": (lambda optimizer: Blind, "H105"),
    "a plateau inside": (plateau_inside, "H105"),
    "a plateau in a chain": (
        lambda optimizer: lr_scheduler.ChainedScheduler([Demanding(optimizer)]),
        "H105",
    ),
    "a plateau of timm's kind without a metric": (EpochOnly, "H105"),
    "epochs without a loader": (Calls, "H105"),
    "state of code": (lambda optimizer: Unsaveable(), "H310"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_driven_is_refused_before_a_run_directory_is_made(tmp_path, name):
    """A schedule that would never advance, or could not be resumed, ends the start and not the
    run.
    """
    make, rule = REFUSED[name]
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(holdfast.HoldfastError) as caught:
        holdfast.Guard(
            tmp_path / "run", model=model, optimizer=optimizer, scheduler=make(optimizer)
        )
    assert caught.value.rule == rule
    assert not (tmp_path / "run").exists()


def test_a_schedule_of_epochs_needs_a_loader_of_which_the_guard_sees_the_end(tmp_path):
    """Without one it would never advance."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler.StepLR(optimizer, 5)}
    with pytest.raises(PolicyError) as caught:
        holdfast.Guard(tmp_path, scheduler_interval="epoch", **parts)
    assert caught.value.rule == "H105"
    holdfast.Guard(tmp_path, **parts)
