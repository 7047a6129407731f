"""Use the schedule length in the script when a run is trained for longer.

``load_state_dict`` of a torch scheduler also loads the length of the schedule. If the run is
extended, this is the old length: at its end, a OneCycleLR raises ValueError, a CosineAnnealingLR
lets the rate rise again, and a PolynomialLR stays at 0. A LambdaLR, in contrast, always uses the
function in the script, because checkpoints do not contain functions.

If the length in the script differs from that in the checkpoint, the run therefore continues with
the length in the script. From the resumed step on, the learning rate is the one that the new
schedule has at that step. All other settings, such as the base rates, come from the checkpoint.

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

# The attribute with the length of each kind of schedule. Subclasses do not count, since they may
# compute the rate in another way.
_LENGTH_ATTRIBUTE: dict[type, str] = {
    ConstantLR: "total_iters",
    CosineAnnealingLR: "T_max",
    LinearLR: "total_iters",
    MultiStepLR: "milestones",
    OneCycleLR: "total_steps",
    PolynomialLR: "total_iters",
    SequentialLR: "_milestones",
}
# Torch computes the rate of these schedules from the previous rate. It also has a formula that
# gives the rate at any step: ``_get_closed_form_lr``.
_WITH_FORMULA = (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    PolynomialLR,
    StepLR,
)
# Torch computes the rate of these schedules from the number of steps only.
_WITHOUT_MEMORY = (LambdaLR, OneCycleLR)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthChange:
    """A schedule that continues with the length in the script.

    `changed` describes each length that has changed, with its values before and now. The rates are
    those of the first parameter group at the resumed step, under the earlier and the new schedule.
    """

    scheduler: str
    changed: tuple[str, ...]
    rate_before: float
    rate_now: float


class ScriptLengths:
    """The lengths of the schedules in the script. Create this before a checkpoint is loaded.

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
        """Set the schedules to the lengths in the script, after a checkpoint was loaded.

        The earlier length is the one that the script gave when the checkpoint was saved. If the
        script still gives this length, the schedule keeps the length that was loaded, because the
        script may have set another one after the guard was created.

        Args:
            begun_with: The settings in the checkpoint, keyed as in `Parts.settings`.

        Returns:
            The schedules whose length has changed.

        Raises:
            CheckpointError: H313 if the rate of such a schedule depends on more than the number of
                steps, or if the schedule would already have ended.
        """
        changes = []
        for name, scheduler in self._schedulers.items():
            changed = self._changed_lengths(name, begun_with)
            if not changed and not self._has_new_function(scheduler):
                continue
            rate_before = _first_rate(scheduler)
            if changed:
                self._set_lengths(name, changed)
            else:
                changed = ["lr_lambda: a different function than before"]
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

    def _changed_lengths(self, name: str, begun_with: Mapping[str, Any]) -> list[str]:
        """Return a description of each length of a schedule that the script has changed."""
        changed = []
        for attribute, now in self._lengths[name].items():
            before = begun_with.get(f"scheduler {name}.{attribute}", now)
            if before != now:
                changed.append(f"{attribute}: {before} before, now {now}")
        return changed

    def _has_new_function(self, scheduler: Any) -> bool:
        return self._is_alone(scheduler) and _function_has_changed(scheduler)

    def _set_lengths(self, name: str, changed: list[str]) -> None:
        """Set a schedule and those inside it to their lengths in the script."""
        self._check_defined(name, changed)
        for inner, attributes in self._attributes[name]:
            vars(inner).update(attributes)
        self._check_not_over(name, changed)

    def _is_alone(self, scheduler: Any) -> bool:
        """Return whether no other scheduler changes the rates of the same optimizer."""
        optimizer = getattr(scheduler, "optimizer", None)
        return not any(
            other is not scheduler and getattr(other, "optimizer", None) is optimizer
            for other in self._schedulers.values()
        )

    def _check_defined(self, name: str, changed: list[str]) -> None:
        """Check that the rate of a schedule depends on nothing but the number of steps."""
        scheduler = self._schedulers[name]
        if not self._is_alone(scheduler):
            limit = "another scheduler also changes the rates of its optimizer"
        elif not has_defined_rates(scheduler):
            limit = "its rate depends on the earlier rates, and not only on the number of steps"
        else:
            return
        raise _refused(name, scheduler, changed, limit, "restore its earlier length")

    def _check_not_over(self, name: str, changed: list[str]) -> None:
        """Check that the run has not yet gone beyond the end of a schedule."""
        scheduler = self._schedulers[name]
        left = steps_left(scheduler)
        if left is not None and left < 0:
            steps = scheduler.last_epoch
            raise _refused(
                name,
                scheduler,
                changed,
                f"the run has already stepped it {steps} times, and it ends {-left} steps earlier",
                f"set it to at least {steps} steps, or to more if training is to continue",
            )


def lengths_of(scheduler: Any) -> dict[str, Any]:
    """Return the lengths of a schedule and of the schedules inside it, by attribute.

    The names of the attributes of an inner schedule begin with its index, as in ``"1.T_max"``.
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
    """Yield a torch scheduler and the schedulers inside it, each with a prefix for its settings.

    The prefix consists of indices, such as ``"1."``. That of the outermost scheduler is `prefix`.
    """
    yield prefix, scheduler
    if isinstance(scheduler, (ChainedScheduler, SequentialLR)):
        for number, inner in enumerate(scheduler._schedulers):
            yield from with_inner(inner, f"{prefix}{number}.")


def steps_left(scheduler: Any) -> int | None:
    """Return how many more steps a scheduler can make before torch raises ValueError.

    Returns:
        The number of steps. It is negative if the schedule ended earlier. None if there is no
        limit.
    """
    if isinstance(scheduler, OneCycleLR):
        if type(scheduler).step is not OneCycleLR.step:
            # A derived class, such as that for Accelerate, may stop at the end without an error.
            return None
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
        _set_rates_of_sequence(scheduler)
    elif type(scheduler) in _WITHOUT_MEMORY:
        _repeat_step(scheduler)
    else:
        _set_rates_by_formula(scheduler)


def _set_rates_of_sequence(scheduler: SequentialLR) -> None:
    active = _active_inner(scheduler)
    number = scheduler._schedulers.index(active)
    begins_at = scheduler._milestones[number - 1] if number > 0 else 0
    active.last_epoch = scheduler.last_epoch - begins_at
    set_rates(active)
    scheduler._last_lr = active.get_last_lr()


def _repeat_step(scheduler: Any) -> None:
    """Repeat the last step of a schedule that computes its rates from the number of steps only."""
    step_count = scheduler._step_count
    scheduler.last_epoch -= 1
    # In its first step, a scheduler warns if its optimizer has not stepped yet. In a resumed run,
    # the optimizer has stepped in an earlier attempt, so this must not look like the first step.
    scheduler._step_count = max(step_count, 2)
    scheduler.step()
    scheduler._step_count = step_count


def _set_rates_by_formula(scheduler: Any) -> None:
    groups = scheduler.optimizer.param_groups
    for group, rate in zip(groups, scheduler._get_closed_form_lr(), strict=True):
        if isinstance(group["lr"], torch.Tensor):
            # A captured or compiled step refers to this tensor.
            group["lr"].fill_(float(rate))
        else:
            group["lr"] = rate
    scheduler._last_lr = [
        rate.clone() if isinstance(rate, torch.Tensor) else rate
        for rate in (group["lr"] for group in groups)
    ]


def _active_inner(scheduler: SequentialLR) -> Any:
    """Return the inner scheduler that determines the current rate."""
    return scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]


def _length_attributes(scheduler: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return a scheduler and the schedulers inside it, with the attributes that set its length."""
    attributes = []
    for _, inner in with_inner(scheduler):
        names = []
        if type(inner) in _LENGTH_ATTRIBUTE:
            names.append(_LENGTH_ATTRIBUTE[type(inner)])
        if type(inner) is OneCycleLR:
            # Torch computes the phases from `total_steps` when the scheduler is created.
            names.append("_schedule_phases")
        attributes.append((inner, {name: getattr(inner, name) for name in names}))
    return attributes


def _function_has_changed(scheduler: Any) -> bool:
    """Return whether the function of a LambdaLR gives another rate than in the checkpoint.

    The checkpoint contains the last rate that the function has given, even if the script has since
    set another rate in the optimizer. A function that raises an exception, for example because it
    uses something that does not exist yet, counts as unchanged.
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
    # The tolerances only allow for rounding.
    return not all(
        math.isclose(float(rate), float(last), rel_tol=1e-6, abs_tol=1e-12)
        for rate, last in zip(rates, scheduler.get_last_lr(), strict=True)
    )


def _first_rate(scheduler: Any) -> float:
    """Return the current learning rate of the first parameter group."""
    return float(rate_of(scheduler.optimizer.param_groups[0]))


def _refused(
    name: str, scheduler: Any, changed: list[str], limit: str, fix: str
) -> CheckpointError:
    """Return the error for a schedule whose length must not change."""
    return CheckpointError(
        f"scheduler {name!r}, a {type(scheduler).__name__}, has a different length than before"
        f" ({'; '.join(changed)})",
        limit=limit,
        fix=f"{fix}, or start a new run directory with the weights of this run.",
        rule="H313",
    )
