"""Learning-rate schedulers, driven so that a schedule counts what really happened."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.core.errors import PolicyError


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


def check_schedulers(schedulers: Mapping[str, Any]) -> None:
    """Check that these schedulers can be driven, before a run starts."""
    for name, scheduler in schedulers.items():
        for inner in _nested(scheduler):
            if inner is not scheduler and needs_metric(inner):
                raise PolicyError(
                    f"scheduler {name!r} is a {type(scheduler).__name__} that holds a {type(inner).__name__}",
                    limit=f"the step of a {type(inner).__name__} needs a metric, which it is not given in there",
                    fix=f"give Guard both, beside each other: scheduler={{{name!r}: ..., 'plateau': ...}}.",
                    rule="H105",
                )


def _nested(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _nested(inner)


def _rates(scheduler: Any) -> list[float]:
    optimizer = getattr(scheduler, "optimizer", None)
    return [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups]
