"""Learning-rate schedulers, driven so that a schedule counts what really happened.

A scheduler of torch computes the next rate from the present one (``StepLR``), from rates that it has kept
(``LambdaLR``), or from both, and some keep them in the optimizer's groups (``OneCycleLR``). All their formulas are
homogeneous: with every rate that is kept anywhere multiplied by a factor, so is each later rate. All these places are
part of what torch itself saves, so loading older state takes the factor back with everything else.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.core.errors import PolicyError

# Where torch 2.11 to 2.15 keep learning rates: lr_scheduler.py and swa_utils.SWALR. `eps` is ReduceLROnPlateau's
# smallest change of a rate, not a divisor. The last ones are the usual names in warm-up schedulers by other hands.
_GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_ATTRIBUTES = (
    "base_lrs", "_last_lr", "eta_min", "max_lrs", "min_lrs", "default_min_lr", "eps", "min_lr", "max_lr",
    "base_lr", "warmup_start_lr",
)  # fmt: skip


def advance(schedulers: Mapping[str, Any], optimizers: Mapping[str, Optimizer], moved: Sequence[str]) -> None:
    """Advance the schedulers that drive optimizers which have moved, and need no metric for it.

    What is no ``LRScheduler`` of torch is its owner's to drive. A skipped step is no step of the schedule.
    """
    movers = {id(optimizers[name].param_groups) for name in moved}  # a wrapper around an optimizer has the same ones
    for scheduler in schedulers.values():
        if (
            isinstance(scheduler, LRScheduler)
            and id(scheduler.optimizer.param_groups) in movers
            and not needs_metric(scheduler)
        ):
            scheduler.step()


def validated(schedulers: Mapping[str, Any], metric: SupportsFloat, mode: str = "min") -> list[str]:
    """Give a metric to the schedulers that need one of this mode; return the names of those that changed a rate."""
    value = float(metric)
    changed = []
    for name, scheduler in schedulers.items():
        if not needs_metric(scheduler) or not math.isfinite(value) or getattr(scheduler, "mode", mode) != mode:
            continue
        before = _rates(scheduler)
        scheduler.step(value)
        if _rates(scheduler) != before:
            changed.append(name)
    return changed


def needs_metric(scheduler: Any) -> bool:
    """Say whether a scheduler's ``step`` cannot be called without an argument."""
    step = getattr(scheduler, "step", None)
    if not callable(step):
        return False
    method = getattr(step, "__func__", None)
    return _needs_arguments(step, 0) if method is None else _needs_arguments(method, 1)


@functools.lru_cache(maxsize=256)  # asked at each step, and a signature takes ten microseconds
def _needs_arguments(function: Any, given: int) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        known = [each for each in inspect.signature(function).parameters.values() if each.kind in kinds]
    except (TypeError, ValueError):  # written in C, or hidden: taken for one that needs nothing, as in a bare loop
        return False
    return any(parameter.default is parameter.empty for parameter in known[given:])


def check_schedulers(schedulers: Mapping[str, Any], *, scales: bool) -> None:
    """Check that these schedulers can be driven, and with `scales` their rates multiplied, before a run starts."""
    for name, scheduler in schedulers.items():
        for inner in _nested(scheduler):
            if inner is not scheduler and needs_metric(inner):
                raise PolicyError(
                    f"scheduler {name!r} is a {type(scheduler).__name__} that holds a {type(inner).__name__}",
                    limit=f"the step of a {type(inner).__name__} needs a metric, which it is not given in there",
                    fix=f"give Guard both, beside each other: scheduler={{{name!r}: ..., 'plateau': ...}}.",
                    rule="H105",
                )
            if scales and not isinstance(inner, LRScheduler):
                raise PolicyError(
                    f"scheduler {name!r} is a {type(inner).__name__}",
                    limit="only in an LRScheduler of torch can learning rates be multiplied so that they stay so",
                    fix="write it as a torch.optim.lr_scheduler.LambdaLR, or leave rollback_lr_factor=None.",
                    rule="H105",
                )


def scale(schedulers: Mapping[str, Any], optimizers: Mapping[str, Optimizer], factor: float) -> None:
    """Multiply every learning rate by a factor, so that each later rate of every schedule is multiplied as well.

    The present rate is multiplied, and all that the schedulers keep: first and largest rates, minima, SWALR's goal;
    also of those inside SequentialLR and ChainedScheduler. New containers are made, so state that was taken before is
    not touched.
    """
    for group in _groups(schedulers, optimizers):
        for key in _GROUP_KEYS:
            if group.get(key) is not None:
                group[key] = _times(group[key], factor, in_place=key == "lr")
    kept = {id(inner): inner for scheduler in schedulers.values() for inner in _nested(scheduler)}
    for inner in kept.values():
        for name in _ATTRIBUTES:
            value = vars(inner).get(name) if isinstance(inner, LRScheduler) else None
            if isinstance(value, (list, tuple)):
                setattr(inner, name, type(value)(_times(each, factor) for each in value))
            elif value is not None:
                setattr(inner, name, _times(value, factor))


def _groups(schedulers: Mapping[str, Any], optimizers: Mapping[str, Optimizer]) -> Iterator[dict[str, Any]]:
    driven = (each.optimizer for each in schedulers.values() if isinstance(each, LRScheduler))
    everyone = (*optimizers.values(), *driven)
    unique = {id(group): group for optimizer in everyone for group in optimizer.param_groups}
    yield from unique.values()


def _nested(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _nested(inner)


def _times(value: Any, factor: float, *, in_place: bool = False) -> Any:
    if isinstance(value, torch.Tensor):
        # A compiled or captured optimizer step reads this very tensor.
        return value.mul_(factor) if in_place else value * factor
    return value * factor


def _rates(scheduler: Any) -> list[float]:
    optimizer = getattr(scheduler, "optimizer", None)
    return [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups]
