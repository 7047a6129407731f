"""Let the length of a schedule come from the script when a run is trained for longer.

The ``load_state_dict`` of torch's schedulers also loads the length of the schedule. If the script
has since become longer, a OneCycleLR raises ValueError at its old end, a CosineAnnealingLR lets the
rate rise again, and a PolynomialLR stays at 0. A LambdaLR in contrast always uses the function in
the script, because functions are not saved.

A run whose script gives another length than before therefore continues with the length in the
script: from the resumed step on, the learning rate is the one that the new schedule has at this
step. All other values, such as the base rates, come from the checkpoint.

This is possible only if the rate depends on nothing but the base rate and the number of steps. Any
other schedule whose length has changed is refused with H313.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from holdfast.core.errors import CheckpointError
from holdfast.learning.learning_rate import rate_of
from holdfast.loader.signalled import let_through

# The attribute that holds the length of each kind of schedule. Subclasses are not listed, since
# they may compute the rate in another way.
_LENGTH_ATTRIBUTE: dict[type, str] = {
    ConstantLR: "total_iters",
    CosineAnnealingLR: "T_max",
    LinearLR: "total_iters",
    MultiStepLR: "milestones",
    OneCycleLR: "total_steps",
    PolynomialLR: "total_iters",
    SequentialLR: "_milestones",
}
# Torch computes the rate of these from the previous rate, but also has a formula for any step.
_WITH_FORMULA = (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    PolynomialLR,
    StepLR,
)
# Torch computes the rate of these from the number of steps only.
_WITHOUT_MEMORY = (LambdaLR, OneCycleLR)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthChange:
    """A schedule that continues with the length in the script.

    `changed` names each length with its values before and now. The rates are those of the first
    parameter group at the resumed step.
    """

    scheduler: str
    changed: tuple[str, ...]
    rate_before: float
    rate_now: float


class ScriptLengths:
    """The lengths of the schedules in the script, taken before a checkpoint is loaded.

    Args:
        schedulers: The schedulers of the run, by name.
    """

    def __init__(self, schedulers: Mapping[str, Any]) -> None:
        self._schedulers = schedulers
        self._attributes = {
            name: _length_attributes(scheduler) for name, scheduler in schedulers.items()
        }
        self._lengths = {name: lengths_of(scheduler) for name, scheduler in schedulers.items()}

    def restore(self, begun_with: Mapping[str, Any]) -> list[LengthChange]:
        """Give the schedules their lengths in the script again, after a checkpoint was loaded.

        A length that the script has not changed stays that of the checkpoint, because the script
        may have set it after the guard was created.

        Args:
            begun_with: The settings in the checkpoint, keyed as in `Parts.settings`.

        Returns:
            The schedules that have another length now.

        Raises:
            CheckpointError: H313 if the rate of a changed schedule is not defined.
        """
        changes = []
        for name, scheduler in self._schedulers.items():
            changed = []
            for key, now in self._lengths[name].items():
                before = begun_with.get(f"scheduler {name}.{key}", now)
                if before != now:
                    changed.append(f"{key}: {before} before, now {now}")
            if changed:
                self._check_defined(name, changed)
                rate_before = _first_rate(scheduler)
                for inner, attributes in self._attributes[name]:
                    vars(inner).update(attributes)
                self._check_not_over(name, changed)
            elif self._is_alone(scheduler) and _function_has_changed(scheduler):
                changed = ["lr_lambda: another function than before"]
                rate_before = _first_rate(scheduler)
            else:
                continue
            set_rates(scheduler)
            changes.append(
                LengthChange(
                    scheduler=name,
                    changed=tuple(changed),
                    rate_before=rate_before,
                    rate_now=_first_rate(scheduler),
                )
            )
        return changes

    def _is_alone(self, scheduler: Any) -> bool:
        """Return whether no other scheduler changes the rates of the same optimizer."""
        optimizer = getattr(scheduler, "optimizer", None)
        return not any(
            other is not scheduler and getattr(other, "optimizer", None) is optimizer
            for other in self._schedulers.values()
        )

    def _check_defined(self, name: str, changed: list[str]) -> None:
        scheduler = self._schedulers[name]
        if self._is_alone(scheduler) and has_defined_rates(scheduler):
            return
        limit = "another scheduler also changes the rates of its optimizer"
        if self._is_alone(scheduler):
            limit = "its rate depends on the earlier rates, and not only on the number of steps"
        raise _refused(name, scheduler, changed, limit, "give it its earlier length again")

    def _check_not_over(self, name: str, changed: list[str]) -> None:
        scheduler = self._schedulers[name]
        left = steps_left(scheduler)
        if left is not None and left < 0:
            steps = scheduler.last_epoch
            raise _refused(
                name,
                scheduler,
                changed,
                f"the run has already stepped it {steps} times, and it ends {-left} steps earlier",
                f"give it at least {steps} steps, and more if the run is to train on",
            )


def lengths_of(scheduler: Any) -> dict[str, Any]:
    """Return the lengths of a schedule and of those inside it, by attribute.

    The names of the attributes of an inner scheduler begin with its number, as in ``"1.T_max"``.
    """
    lengths = {}
    for prefix, inner in with_inner(scheduler):
        attribute = _LENGTH_ATTRIBUTE.get(type(inner))
        if attribute is not None:
            length = getattr(inner, attribute)
            if isinstance(length, Counter):
                length = sorted(length.elements())
            lengths[prefix + attribute] = length
    return lengths


def with_inner(scheduler: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a torch scheduler and the schedulers inside it, each with a prefix for its settings."""
    yield prefix, scheduler
    if isinstance(scheduler, (ChainedScheduler, SequentialLR)):
        for number, inner in enumerate(scheduler._schedulers):
            yield from with_inner(inner, f"{prefix}{number}.")


def steps_left(scheduler: Any) -> int | None:
    """Return how often a scheduler can be advanced before torch raises ValueError.

    Return None if there is no limit. A negative number means that the schedule is over already.
    """
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps - scheduler.last_epoch)
    if isinstance(scheduler, SequentialLR) and scheduler._milestones:
        last = scheduler._schedulers[-1]
        if isinstance(last, OneCycleLR):
            begins_at = scheduler._milestones[-1]
            return int(begins_at + last.total_steps - scheduler.last_epoch)
    if isinstance(scheduler, ChainedScheduler):
        limits = [steps_left(inner) for inner in scheduler._schedulers]
        return min((limit for limit in limits if limit is not None), default=None)
    return None


def has_defined_rates(scheduler: Any) -> bool:
    """Return whether the rate depends only on the base rates and on the number of steps."""
    if type(scheduler) is SequentialLR:
        return all(has_defined_rates(inner) for inner in scheduler._schedulers)
    return type(scheduler) in (*_WITH_FORMULA, *_WITHOUT_MEMORY)


def set_rates(scheduler: Any) -> None:
    """Set the rates that a schedule has after ``scheduler.last_epoch`` steps.

    Args:
        scheduler: A scheduler for which `has_defined_rates` is true.
    """
    if type(scheduler) is SequentialLR:
        active = _active_inner(scheduler)
        number = scheduler._schedulers.index(active)
        begins_at = scheduler._milestones[number - 1] if number > 0 else 0
        active.last_epoch = scheduler.last_epoch - begins_at
        set_rates(active)
        scheduler._last_lr = active.get_last_lr()
    elif type(scheduler) in _WITHOUT_MEMORY:
        # This step leads to the position that the scheduler already had. Torch warns if the first
        # step of a scheduler comes before that of its optimizer, which cannot be told here.
        count = scheduler._step_count
        scheduler.last_epoch -= 1
        scheduler._step_count = max(count, 2)
        scheduler.step()
        scheduler._step_count = count
    else:
        groups = scheduler.optimizer.param_groups
        for group, rate in zip(groups, scheduler._get_closed_form_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = rate
        scheduler._last_lr = [
            rate.clone() if isinstance(rate, torch.Tensor) else rate
            for rate in (group["lr"] for group in groups)
        ]


def _active_inner(scheduler: SequentialLR) -> Any:
    return scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]


def _length_attributes(scheduler: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return each scheduler, inner ones included, with the attributes that make up its length."""
    attributes = []
    for _, inner in with_inner(scheduler):
        names = [_LENGTH_ATTRIBUTE.get(type(inner))]
        if type(inner) is OneCycleLR:
            names.append("_schedule_phases")
        attributes.append((inner, {name: getattr(inner, name) for name in names if name}))
    return attributes


def _function_has_changed(scheduler: Any) -> bool:
    """Return whether the function of a LambdaLR gives another rate than in the checkpoint.

    The checkpoint contains the rate that the function last gave. A rate that the script has set
    itself does not count. A function that cannot be called yet counts as unchanged.
    """
    while type(scheduler) is SequentialLR:
        scheduler = _active_inner(scheduler)
    if type(scheduler) is not LambdaLR:
        return False
    try:
        rates = [
            base_rate * function(scheduler.last_epoch)
            for base_rate, function in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
    except Exception as error:  # noqa: BLE001 - a function of the script can raise anything
        let_through(error)
        return False
    return not all(
        math.isclose(float(rate), float(last), rel_tol=1e-6, abs_tol=1e-12)
        for rate, last in zip(rates, scheduler.get_last_lr(), strict=True)
    )


def _first_rate(scheduler: Any) -> float:
    return float(rate_of(scheduler.optimizer.param_groups[0]))


def _refused(
    name: str, scheduler: Any, changed: list[str], limit: str, fix: str
) -> CheckpointError:
    return CheckpointError(
        f"scheduler {name!r}, a {type(scheduler).__name__}, has another length than before"
        f" ({'; '.join(changed)})",
        limit=limit,
        fix=f"{fix}, or start a new run directory with the weights of this run.",
        rule="H313",
    )
