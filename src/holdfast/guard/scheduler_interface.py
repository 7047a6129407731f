"""Determine how a learning-rate scheduler from any library must be advanced.

`interface_of` recognizes schedulers by their methods and argument names:

    step()                               called after each step of its optimizer or each epoch
    step(metric)                         called in ``guard.validated``, as for ReduceLROnPlateau
    step_update(number) and step(epoch)  called after each step and after each epoch, respectively,
                                         as in timm's training script

This module does not advance schedulers; see ``schedules``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from enum import Enum, auto
from types import FunctionType, MethodType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.guard.reachable import contents_of_closure, levels_inside

# A scheduler inside another is searched for at most this many attributes deep. Objects further away
# may belong to other code, such as a trainer.
MOST_LEVELS = 2

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# If the name of the argument of ``step`` contains one of these words, the argument is a metric.
_METRIC_WORDS = (
    "metric",
    "loss",
    "score",
    "perf",
    "result",
    "monitor",
    "reward",
    "err",
    "objective",
    "criterion",
)
# Matches "acc" and "val_accuracy", but not "accumulated_steps".
_ACCURACY = re.compile(r"acc(?!um)")
# Matches "val", "valid_mean" and "evaluation", but not "interval".
_VALIDATION = re.compile(r"(?<![a-z])(val|eval)")


class Interface(Enum):
    """How a scheduler is advanced."""

    # By calling ``step()``.
    STEP = auto()
    # By calling ``step(metric)``.
    METRIC = auto()
    # By calling ``step_update(number)`` and ``step(epoch)``.
    TIMM = auto()


def interface_of(scheduler: Any) -> Interface | None:
    """Return the interface of a scheduler, or None if the guard cannot advance it."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return Interface.METRIC
    if callable(getattr(scheduler, "step_update", None)):
        return Interface.TIMM if _takes_single_numbers(scheduler) else None
    if not callable(getattr(scheduler, "step", None)):
        return None

    needed = _required_arguments(scheduler.step)
    if not needed:
        return Interface.METRIC if _is_plateau_with_optional_metric(scheduler) else Interface.STEP
    if len(needed) == 1 and _is_metric(needed[0], scheduler):
        return Interface.METRIC
    return None


def _takes_single_numbers(scheduler: Any) -> bool:
    """Return whether both of timm's methods can be called with at most one number."""
    step = getattr(scheduler, "step", None)
    step_arguments = [] if step is None else _required_arguments(step)
    return len(step_arguments) <= 1 and len(_required_arguments(scheduler.step_update)) <= 1


def _is_metric(argument: inspect.Parameter, scheduler: Any) -> bool:
    """Return whether the argument of ``step`` is a metric and not, for example, an epoch."""
    if argument.kind not in _POSITIONAL:
        return False
    return _has_mode(scheduler) or _names_a_metric(argument.name)


def _is_plateau_with_optional_metric(scheduler: Any) -> bool:
    """Return whether ``step`` needs a metric although its signature makes the metric optional."""
    if not _has_mode(scheduler):
        return False
    positional = [
        parameter for parameter in parameters_of(scheduler.step) if parameter.kind in _POSITIONAL
    ]
    return bool(positional) and _names_a_metric(positional[0].name)


def _has_mode(scheduler: Any) -> bool:
    """Return whether a scheduler has a ``mode`` of "min" or "max", as plateau schedulers do."""
    return getattr(scheduler, "mode", None) in ("min", "max")


def _names_a_metric(argument_name: str) -> bool:
    """Return whether the name of an argument suggests a metric."""
    name = argument_name.lower()
    if any(word in name for word in _METRIC_WORDS):
        return True
    return bool(_ACCURACY.search(name) or _VALIDATION.search(name))


# --- schedulers inside others


def is_torch_scheduler(value: Any) -> bool:
    """Return whether an object is a torch scheduler or derived from one."""
    return isinstance(value, (LRScheduler, ReduceLROnPlateau))


def plateau_inside(scheduler: Any) -> Any | None:
    """Return the nearest scheduler inside another that needs a metric, or None if there is none."""
    visited = {id(scheduler)}
    waiting = [scheduler]
    while waiting:
        for level in levels_inside(waiting.pop(0), is_torch_scheduler, most_levels=MOST_LEVELS):
            for inner in level:
                if interface_of(inner) is Interface.METRIC:
                    return inner
                if id(inner) not in visited:
                    visited.add(id(inner))
                    waiting.append(inner)
    return None


def counts_epochs(scheduler: Any) -> bool:
    """Return whether a scheduler with timm's interface, or one inside it, counts epochs.

    timm's schedulers state this in their attribute ``t_in_epochs``. Without the attribute, return
    True.
    """
    if hasattr(scheduler, "t_in_epochs"):
        return bool(scheduler.t_in_epochs)
    levels = levels_inside(
        scheduler, lambda value: hasattr(value, "t_in_epochs"), most_levels=MOST_LEVELS
    )
    for level in levels:
        if level:
            return any(inner.t_in_epochs for inner in level)
    return True


# --- arguments of methods


def takes_epoch_and_metric(scheduler: Any) -> bool:
    """Return whether ``step(epoch, metric)`` is a valid call."""
    step = getattr(scheduler, "step", None)
    if not callable(step):
        return False
    kinds = [parameter.kind for parameter in parameters_of(step)]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return True
    return sum(kind in _POSITIONAL for kind in kinds) >= 2


def call_with_number(function: Callable[..., Any], name: str, number: int) -> None:
    """Call a function with a number, whatever the name of its parameter is.

    The number is passed by keyword if a parameter has the given name or if the function takes no
    positional arguments, and otherwise as the first argument. A function without parameters is
    called without the number.

    Args:
        function: The function to call.
        name: The usual name of the parameter.
        number: The number to pass.
    """
    parameters = parameters_of(function)
    takes_position = any(
        parameter.kind in (*_POSITIONAL, inspect.Parameter.VAR_POSITIONAL)
        for parameter in parameters
    )
    if not parameters:
        function()
    elif not takes_position or any(parameter.name == name for parameter in parameters):
        function(**{name: number})
    else:
        function(number)


def _required_arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function that have no default."""
    return [
        parameter
        for parameter in parameters_of(function)
        if parameter.default is parameter.empty and parameter.kind not in _VARIABLE
    ]


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, or an empty list if it has no signature.

    Some functions in C extensions have no signature. A decorator that does not use
    `functools.wraps` hides the signature behind ``*args`` and ``**kwargs``. In that case, the
    parameters are those of the decorated function, which is found in the decorator's closure.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    if any(parameter.kind not in _VARIABLE for parameter in parameters):
        return parameters

    is_bound = getattr(function, "__self__", None) is not None
    decorated = _decorated_by(getattr(function, "__func__", function))
    if decorated is None:
        return parameters
    if is_bound and isinstance(decorated, FunctionType):
        # The function was decorated inside a class, so its first parameter is `self`.
        return parameters_of(decorated)[1:]
    return parameters_of(decorated)


def _decorated_by(wrapper: Any) -> FunctionType | MethodType | None:
    """Return the function that a decorator has wrapped, or None if it cannot be identified.

    The function is identified if it is the only function in the wrapper's closure.
    """
    if not isinstance(wrapper, FunctionType):
        return None
    functions = [
        value
        for value in contents_of_closure(wrapper)
        if isinstance(value, (FunctionType, MethodType))
    ]
    if len(functions) != 1:
        return None
    return functions[0]
