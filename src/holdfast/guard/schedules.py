"""Advance learning-rate schedulers after committed steps and completed epochs.

When the guard is created, ``scheduler_interface`` determines how each scheduler is advanced. A
scheduler that the guard cannot advance correctly is refused with H105. With
``scheduler_interval=None``, the caller advances all schedulers except those that need a metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from torch.optim import Optimizer

from holdfast.core.errors import PolicyError
from holdfast.guard.optimizers import identities, looks_like_an_optimizer
from holdfast.guard.reachable import levels_inside
from holdfast.guard.schedule_length import steps_left
from holdfast.guard.scheduler_interface import (
    MOST_LEVELS,
    Interface,
    call_with_number,
    counts_epochs,
    interface_of,
    is_torch_scheduler,
    plateau_inside,
    takes_epoch_and_metric,
)
from holdfast.learning.learning_rate import rate_of


class Schedule:
    """A scheduler with its interface and the optimizer whose steps it counts.

    Args:
        name: The scheduler's name in the guard.
        scheduler: The scheduler.
        interface: How the scheduler is advanced.
        optimizer: The name of the optimizer, or an empty string if it is unknown.
    """

    def __init__(self, name: str, scheduler: Any, interface: Interface, optimizer: str) -> None:
        self.name = name
        self.scheduler = scheduler
        self.interface = interface
        self.optimizer = optimizer
        # The number of the optimizer's steps over all attempts of the run, which is passed to
        # ``step_update``.
        self.updates = 0
        # The scheduler that takes the metric: `scheduler`, or the ReduceLROnPlateau inside timm's
        # PlateauLRScheduler. None if no metric is needed.
        self._plateau = scheduler if interface is Interface.METRIC else None
        if interface is Interface.TIMM:
            self._plateau = plateau_inside(scheduler)

    @property
    def lacks_metric(self) -> bool:
        """Return whether the scheduler needs a metric but has never received one."""
        return self._plateau is not None and not getattr(self._plateau, "last_epoch", 0)

    def after_step(self) -> None:
        """Advance the scheduler after a step of its optimizer."""
        self.updates += 1
        if self.interface is Interface.TIMM:
            call_with_number(self.scheduler.step_update, "num_updates", self.updates)
        elif self.interface is Interface.STEP:
            self._step()

    def after_epoch(self, epochs: int) -> None:
        """Advance the scheduler after an epoch.

        Args:
            epochs: The number of epochs completed so far.
        """
        if self.interface is Interface.STEP:
            self._step()
        elif self.interface is Interface.TIMM and callable(getattr(self.scheduler, "step", None)):
            call_with_number(self.scheduler.step, "epoch", epochs)

    def check_length(self, needed: int) -> None:
        """Raise H105 if the scheduler ends before the run.

        Args:
            needed: How often the run will advance the scheduler.
        """
        left = steps_left(self.scheduler)
        if self.interface is Interface.STEP and left is not None and left < needed:
            raise _too_short(self.name, self.scheduler, left, needed)

    def _step(self) -> None:
        # Torch would raise a ValueError that names neither the scheduler nor a fix.
        self.check_length(1)
        self.scheduler.step()

    def validated(self, metric: float, mode: str, epochs: int) -> bool:
        """Pass a metric to the scheduler if it needs a metric with this mode.

        Args:
            metric: The value of the metric, which must be finite.
            mode: ``"min"`` if lower values are better, otherwise ``"max"``.
            epochs: The number of epochs completed so far.

        Returns:
            Whether a learning rate has changed.
        """
        if self._plateau is None or getattr(self._plateau, "mode", mode) != mode:
            return False
        before = self._rates()
        if self.interface is Interface.METRIC:
            self.scheduler.step(metric)
        else:
            self.scheduler.step(epochs, metric)
        return self._rates() != before

    def _rates(self) -> list[float]:
        optimizer = getattr(self.scheduler, "optimizer", None)
        return [rate_of(group) for group in getattr(optimizer, "param_groups", ())]


class Schedules:
    """Advances the schedulers of a run after steps, epochs and validations.

    Args:
        schedulers: The schedulers by name. A scheduler may have the name of its optimizer.
        optimizers: The guard's optimizers by name.
        interval: The value of ``Policy.scheduler_interval``: ``"step"``, ``"epoch"``, or None if
            the caller advances the schedulers.
        has_epochs: Whether the guard iterates a loader and can thus tell where an epoch ends.

    Raises:
        PolicyError: H105 for a scheduler that the guard cannot advance.
    """

    def __init__(
        self,
        schedulers: Mapping[str, Any],
        optimizers: Mapping[str, Optimizer],
        interval: str | None,
        *,
        has_epochs: bool,
    ) -> None:
        self._interval = interval
        # Whether any metric has been reported, regardless of its mode and value.
        self._has_metric = False
        self._schedules: list[Schedule] = []
        # How often the loop will advance each scheduler. None once that was checked.
        self._expected: int | None = None
        if interval is None:
            # The caller advances the schedulers, but `Guard.validated` still passes on metrics.
            for name, scheduler in schedulers.items():
                if interface_of(scheduler) is Interface.METRIC:
                    self._schedules.append(Schedule(name, scheduler, Interface.METRIC, ""))
            return

        for name, scheduler in schedulers.items():
            interface = _checked_interface(name, scheduler)
            if _advances_by_epochs(scheduler, interface, interval) and not has_epochs:
                raise _epochs_unknown(name, scheduler)
            counts_steps = interface is not Interface.METRIC
            optimizer = _optimizer_of(name, scheduler, optimizers, counts_steps=counts_steps)
            self._schedules.append(Schedule(name, scheduler, interface, optimizer))
        _check_not_inside(schedulers)

    def hand_over(self) -> None:
        """Leave the schedulers to the caller, as with ``scheduler_interval=None``."""
        self._interval = None

    def after_step(self, moved: Sequence[str]) -> None:
        """Advance the schedulers of the optimizers that have committed a step.

        With ``interval="epoch"``, only timm schedulers are advanced here, since they count both
        steps (``step_update``) and epochs (``step``). Do not call this after a skipped step.

        Args:
            moved: The names of the optimizers that have stepped.
        """
        for schedule in self._schedules:
            if schedule.optimizer in moved and (
                self._interval == "step" or schedule.interface is Interface.TIMM
            ):
                schedule.after_step()

    def after_epoch(self, epochs: int) -> None:
        """Advance the schedulers that count epochs.

        Args:
            epochs: The number of epochs completed so far, over all attempts of the run.
        """
        if self._interval is None:
            return
        for schedule in self._schedules:
            if self._interval == "epoch" or schedule.interface is Interface.TIMM:
                schedule.after_epoch(epochs)

    def expect(self, *, steps: int, epochs: int) -> None:
        """Note how long the loop that is about to start will be, as far as that is certain.

        `before_step` compares this with the lengths of the schedules.

        Args:
            steps: The number of steps of all optimizers together.
            epochs: The number of epochs.
        """
        if len({schedule.optimizer for schedule in self._schedules}) > 1:
            # How many of the steps are made by each optimizer is not known.
            steps = min(steps, 1)
        self._expected = steps if self._interval == "step" else epochs

    def before_step(self, moving: Sequence[str]) -> None:
        """Raise H105 if a schedule of fixed length ends before this step, or before the loop.

        The length of the loop is compared only when its first step begins, because only then is it
        known whether the guard advances the schedulers or the script does.

        Args:
            moving: The names of the optimizers that are about to step.
        """
        needed = self._expected
        self._expected = None
        if self._interval is None:
            return
        for schedule in self._schedules:
            if needed is not None:
                schedule.check_length(needed)
            if self._interval == "step" and schedule.optimizer in moving:
                schedule.check_length(1)

    def validated(self, metric: SupportsFloat, mode: str, epochs: int) -> list[str]:
        """Pass a metric to the schedulers that need a metric with this mode.

        NaN and Inf are not passed on.

        Args:
            metric: The value of the metric.
            mode: ``"min"`` if lower values are better, otherwise ``"max"``.
            epochs: The number of epochs completed so far.

        Returns:
            The names of the schedulers that have changed a learning rate.
        """
        self._has_metric = True
        value = float(metric)
        if not math.isfinite(value):
            return []
        return [
            schedule.name for schedule in self._schedules if schedule.validated(value, mode, epochs)
        ]

    def without_metric(self) -> list[str]:
        """Return the names of the schedulers that need a metric but have never received one.

        The list is empty once any metric has been reported, even one that no scheduler uses.
        """
        if self._has_metric:
            return []
        return [schedule.name for schedule in self._schedules if schedule.lacks_metric]

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps that each scheduler has counted, keyed by its name.

        ``scheduler_state.state_of`` returns the state of a scheduler itself.
        """
        return {schedule.name: schedule.updates for schedule in self._schedules}

    def load_state_dict(self, state: Mapping[str, int], *, default: int) -> None:
        """Restore the number of steps that each scheduler has counted.

        Args:
            state: The return value of `state_dict`.
            default: The number of steps for schedulers that are not in `state`.
        """
        for schedule in self._schedules:
            schedule.updates = int(state.get(schedule.name, default))


# --- checks when the guard is created


def _checked_interface(name: str, scheduler: Any) -> Interface:
    """Return the interface of a scheduler, or raise H105 if the guard cannot advance it."""
    kind = type(scheduler).__name__
    interface = interface_of(scheduler)
    if interface is None:
        raise _refused(
            f"scheduler {name!r} is a {kind}, whose step() cannot be called without arguments",
            "the guard calls step() after each step or epoch, step(metric) if the scheduler needs"
            " a metric, or step_update(n) and step(epoch) as timm does",
            "wrap it in an object with step(), state_dict() and load_state_dict(state)",
        )
    if interface is Interface.METRIC:
        return interface
    if interface is Interface.TIMM and takes_epoch_and_metric(scheduler):
        return interface

    plateau = plateau_inside(scheduler)
    if plateau is not None:
        inner_kind = type(plateau).__name__
        raise PolicyError(
            f"scheduler {name!r} is a {kind} that contains a {inner_kind}",
            limit=f"step() of a {inner_kind} needs a metric, but the {kind} does not pass one on",
            fix=(
                f"give Guard both schedulers separately: scheduler={{{name!r}: ..., 'plateau':"
                " ...}."
            ),
            rule="H105",
        )
    return interface


def _advances_by_epochs(scheduler: Any, interface: Interface, interval: str) -> bool:
    """Return whether the guard advances a scheduler at the end of each epoch."""
    if interface is Interface.TIMM:
        return counts_epochs(scheduler)
    return interface is Interface.STEP and interval == "epoch"


def _too_short(name: str, scheduler: Any, left: int, needed: int) -> PolicyError:
    """Return an H105 error for a schedule that ends before the run."""
    return PolicyError(
        f"scheduler {name!r}, a {type(scheduler).__name__}, can be advanced {max(left, 0)} more"
        f" times, but the run needs {needed} or more",
        limit="a schedule of this kind has a fixed length, and torch raises ValueError at its end",
        fix=(
            "give the schedule the length of the whole run, in the unit in which it is advanced"
            " (scheduler_interval: steps or epochs), and start again; a resumed run takes the"
            " length from the script."
        ),
        rule="H105",
    )


def _epochs_unknown(name: str, scheduler: Any) -> PolicyError:
    """Return an H105 error for a scheduler that counts epochs when Guard has no loader."""
    return _refused(
        f"scheduler {name!r} is a {type(scheduler).__name__} that counts epochs, but Guard has no"
        " loader",
        "the guard can tell where an epoch ends only in a loop over guard.batches()",
        "pass loader= and iterate guard.batches(), or let the scheduler count steps",
    )


def _optimizer_of(
    name: str, scheduler: Any, optimizers: Mapping[str, Optimizer], *, counts_steps: bool
) -> str:
    """Return the name of the optimizer that a scheduler drives.

    This is the nearest optimizer that can be reached through the scheduler's attributes. If none
    can be reached, or if several are equally near, it is the optimizer with the same name as the
    scheduler, or the guard's only optimizer.

    Args:
        name: The name of the scheduler.
        scheduler: The scheduler.
        optimizers: The guard's optimizers by name.
        counts_steps: Whether the scheduler is advanced after its optimizer's steps. If so, the
            optimizer must be identified.

    Returns:
        The name, or an empty string if the optimizer is unknown and `counts_steps` is False.

    Raises:
        PolicyError: H105 if the scheduler drives an optimizer that was not passed to the guard, or
            if `counts_steps` is True and the optimizer cannot be identified.
    """
    nearest = nearest_optimizers(scheduler, optimizers)
    if name in nearest:
        return name
    if len(nearest) == 1:
        return nearest[0]

    kind = type(scheduler).__name__
    if not nearest and any(levels_inside(scheduler, looks_like_an_optimizer)):
        raise _refused(
            f"scheduler {name!r} is a {kind} whose optimizer was not passed to Guard",
            "it would change the learning rates of an optimizer that guard.step never steps",
            "create the scheduler with the optimizer that is passed to Guard",
        )
    if name in optimizers:
        return name
    if len(optimizers) == 1:
        return next(iter(optimizers))
    if not counts_steps:
        return ""
    raise _refused(
        f"scheduler {name!r} is a {kind} that may drive any of the optimizers"
        f" {', '.join(map(repr, optimizers))}",
        "the guard advances a scheduler after the steps of the optimizer that it drives",
        "name the scheduler after that optimizer, scheduler={'generator': ...}",
    )


def nearest_optimizers(scheduler: Any, optimizers: Mapping[str, Optimizer]) -> list[str]:
    """Return the names of the guard's optimizers that are nearest to a scheduler.

    The distance is the number of attributes on the path from the scheduler to the optimizer.
    """
    for level in levels_inside(scheduler, looks_like_an_optimizer):
        ids_in_level = set[int]().union(*map(identities, level))
        names = [
            name
            for name, optimizer in optimizers.items()
            if not ids_in_level.isdisjoint(identities(optimizer))
        ]
        if names:
            return names
    return []


def _check_not_inside(schedulers: Mapping[str, Any]) -> None:
    """Raise H105 if one scheduler contains another, because both would advance the inner one."""
    names = {id(scheduler): name for name, scheduler in schedulers.items()}
    for outer_name, outer in schedulers.items():
        for level in levels_inside(outer, is_torch_scheduler, most_levels=MOST_LEVELS):
            for inner in level:
                if id(inner) in names and interface_of(inner) is not Interface.METRIC:
                    raise _refused(
                        f"scheduler {names[id(inner)]!r} is inside scheduler {outer_name!r}",
                        "the inner one would be advanced twice in each step",
                        "give Guard only the outer one",
                    )


def _refused(problem: str, limit: str, fix: str) -> PolicyError:
    """Return an H105 error for a scheduler.

    The text of the fix is `fix`, followed by an alternative that works for any scheduler.
    """
    return PolicyError(
        problem,
        limit=limit,
        fix=(
            f"{fix}. Or set scheduler_interval=None and advance the scheduler yourself, after each"
            " step that was not skipped."
        ),
        rule="H105",
    )
