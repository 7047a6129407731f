"""Advance learning-rate schedulers by the steps that were committed and the epochs that were
completed.

`interface_of` recognises from the methods of a scheduler, whichever library it comes from, when to
call it:

    step()                               after each step of its optimizer, or after each epoch
    step(metric)                         in ``guard.validated``, as for ReduceLROnPlateau
    step_update(number) and step(epoch)  after each step and after each epoch, as timm's training
                                         script does

A scheduler with none of these interfaces is refused when the guard is made. With
``scheduler_interval=None`` the caller advances all schedulers but those that need a metric.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from types import FunctionType, MethodType
from typing import Any, SupportsFloat

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.core.errors import PolicyError
from holdfast.guard.optimizers import identities, looks_like_an_optimizer
from holdfast.guard.reachable import contents_of_closure, levels_inside
from holdfast.learning.learning_rate import rate_of

# Names that the argument of ``step`` has in schedulers that need a metric. "interval" and
# "accumulated_steps" are not among them.
_METRIC_NAME = re.compile(
    r"metric|loss|score|acc(?!um)|(?<![a-z])e?val|perf|result|monitor|reward|err|objective|criterion"
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PLAIN_TYPES = (bool, int, float, str, type(None))
# A scheduler inside another one is searched for at most this many attributes deep. One that is
# further away may belong to a trainer.
_MOST_LEVELS = 2


class Interface(Enum):
    """The methods by which a scheduler is advanced."""

    STEP = auto()  # step()
    METRIC = auto()  # step(metric)
    TIMM = auto()  # step_update(number) and step(epoch)


# --- recognising an interface


def interface_of(scheduler: Any) -> Interface | None:
    """Return the interface of a scheduler, or None if it has none that the guard can drive."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return Interface.METRIC
    step = getattr(scheduler, "step", None)
    if callable(getattr(scheduler, "step_update", None)):
        step_arguments = [] if step is None else required_arguments(step)
        takes_numbers = (
            len(step_arguments) <= 1 and len(required_arguments(scheduler.step_update)) <= 1
        )
        return Interface.TIMM if takes_numbers else None
    if not callable(step):
        return None
    step_arguments = required_arguments(step)
    if not step_arguments:
        return Interface.METRIC if _is_plateau_with_optional_metric(scheduler) else Interface.STEP
    if len(step_arguments) == 1 and _is_metric(step_arguments[0], scheduler):
        return Interface.METRIC
    return None


def required_arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function that have no default.

    None if it has no signature, as some in C.
    """
    return [p for p in _parameters(function) if p.default is p.empty and p.kind not in _VARIABLE]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function.

    For a decorator that takes only ``*args`` and ``**kwargs`` and does not use `functools.wraps`,
    they are those of the function in its closure.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    if any(parameter.kind not in _VARIABLE for parameter in parameters):
        return parameters
    is_bound = getattr(function, "__self__", None) is not None
    decorator = getattr(function, "__func__", function)
    if not isinstance(decorator, FunctionType):
        return parameters
    candidates = [
        value
        for value in contents_of_closure(decorator)
        if isinstance(value, (FunctionType, MethodType))
    ]
    if len(candidates) != 1:
        return parameters
    decorated = candidates[0]
    if is_bound and isinstance(decorated, FunctionType):
        # It was decorated in its class, so that `self` is still its first parameter.
        return _parameters(decorated)[1:]
    return _parameters(decorated)


def _is_metric(argument: inspect.Parameter, scheduler: Any) -> bool:
    """Return whether the argument of a scheduler's ``step`` is a metric, and not for instance an
    epoch.
    """
    if argument.kind not in _POSITIONAL:
        return False
    return getattr(scheduler, "mode", None) in ("min", "max") or bool(
        _METRIC_NAME.search(argument.name.lower())
    )


def _is_plateau_with_optional_metric(scheduler: Any) -> bool:
    """Return whether a scheduler waits for a metric that its step can be called without, to no
    effect.
    """
    if getattr(scheduler, "mode", None) not in ("min", "max"):
        return False
    positional = [
        parameter for parameter in _parameters(scheduler.step) if parameter.kind in _POSITIONAL
    ]
    return bool(positional) and bool(_METRIC_NAME.search(positional[0].name.lower()))


def _plateau_inside(scheduler: Any) -> Any | None:
    """Return the nearest scheduler inside another one that needs a metric, or None."""
    visited = {id(scheduler)}
    waiting = [scheduler]
    while waiting:
        for level in levels_inside(waiting.pop(0), _is_scheduler, most_levels=_MOST_LEVELS):
            for inner in level:
                if interface_of(inner) is Interface.METRIC:
                    return inner
                if id(inner) not in visited:
                    visited.add(id(inner))
                    waiting.append(inner)
    return None


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, (LRScheduler, ReduceLROnPlateau))


# --- one scheduler


class Schedule:
    """One scheduler, its interface, and the name of the optimizer whose steps it counts."""

    def __init__(self, name: str, scheduler: Any, interface: Interface, optimizer: str) -> None:
        self.name = name
        self.scheduler = scheduler
        self.interface = interface
        self.optimizer = optimizer
        # Steps of its optimizer over all attempts of the run. ``step_update`` takes this number.
        self.updates = 0
        # The scheduler that takes the metric. timm's PlateauLRScheduler holds a ReduceLROnPlateau.
        self._plateau = scheduler if interface is Interface.METRIC else None
        if interface is Interface.TIMM:
            self._plateau = _plateau_inside(scheduler)

    @property
    def lacks_metric(self) -> bool:
        """Return whether the scheduler needs a metric and never got one."""
        return self._plateau is not None and not getattr(self._plateau, "last_epoch", 0)

    def after_step(self) -> None:
        """Advance the scheduler by one step of its optimizer."""
        self.updates += 1
        if self.interface is Interface.TIMM:
            _call_with_number(self.scheduler.step_update, "num_updates", self.updates)
        elif self.interface is Interface.STEP:
            self.scheduler.step()

    def after_epoch(self, epochs: int) -> None:
        """Advance the scheduler by one epoch; `epochs` is how many were completed so far."""
        if self.interface is Interface.STEP:
            self.scheduler.step()
        elif self.interface is Interface.TIMM and callable(getattr(self.scheduler, "step", None)):
            _call_with_number(self.scheduler.step, "epoch", epochs)

    def validated(self, metric: float, mode: str, epochs: int) -> bool:
        """Pass a metric on if the scheduler needs one of this mode.

        Return whether a learning rate changed.
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


def _call_with_number(function: Callable[..., Any], name: str, number: int) -> None:
    """Call a function with a number, by keyword if a parameter has this name, else as its first
    argument.

    A function without parameters is called without the number.
    """
    parameters = _parameters(function)
    takes_position = any(
        p.kind in (*_POSITIONAL, inspect.Parameter.VAR_POSITIONAL) for p in parameters
    )
    if not parameters:
        function()
    elif any(p.name == name for p in parameters) or not takes_position:
        function(**{name: number})
    else:
        function(number)


def state_of(scheduler: Any) -> Any:
    """Return the state of a scheduler for a checkpoint.

    The ``state_dict`` of timm's PlateauLRScheduler lacks the numbers of bad epochs and of cooldown
    epochs, so a resumed run would count them from 0. For a scheduler with timm's interface that
    holds a plateau scheduler, the plateau's own state and the plain attributes of the schedulers
    are added.
    """
    plateau = _plateau_inside(scheduler) if interface_of(scheduler) is Interface.TIMM else None
    if plateau is None:
        return scheduler.state_dict()
    attributes = [_plain_attributes(inner) for inner in _timm_schedulers_in(scheduler)]
    return {
        "own": scheduler.state_dict(),
        "attributes": attributes,
        "plateau": plateau.state_dict(),
    }


def load_state(scheduler: Any, saved: Any) -> None:
    """Restore a scheduler from the value of `state_of`."""
    plateau = _plateau_inside(scheduler) if interface_of(scheduler) is Interface.TIMM else None
    if plateau is None:
        scheduler.load_state_dict(saved)
        return
    scheduler.load_state_dict(saved["own"])
    for inner, attributes in zip(_timm_schedulers_in(scheduler), saved["attributes"], strict=True):
        vars(inner).update(attributes)
    plateau.load_state_dict(saved["plateau"])


def _timm_schedulers_in(scheduler: Any) -> list[Any]:
    """Return the scheduler and the schedulers inside it that have timm's interface."""
    inside = levels_inside(scheduler, lambda value: callable(getattr(value, "step_update", None)))
    return [scheduler, *(inner for level in inside for inner in level)]


def _plain_attributes(scheduler: Any) -> dict[str, Any]:
    """Return the attributes that are numbers, strings or None, or lists of them."""
    return {name: value for name, value in vars(scheduler).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, _PLAIN_TYPES) for item in value)
    return isinstance(value, _PLAIN_TYPES)


# --- the schedulers of a run


class Schedules:
    """The schedulers of a run, advanced by its steps, epochs and validations.

    Args:
        schedulers: The schedulers by name. The name may be that of the optimizer that one drives.
        optimizers: The optimizers of the guard by name.
        interval: ``Policy.scheduler_interval``: ``"step"``, ``"epoch"``, or None if the caller
            advances them.
        has_epochs: Whether the guard iterates a loader, and so knows where an epoch ends.

    Raises:
        PolicyError: H105, for a scheduler that the guard cannot drive.
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
        self._schedules: list[Schedule] = []
        for name, scheduler in schedulers.items():
            interface = interface_of(scheduler)
            if interval is None:
                # The caller advances the schedulers, but `guard.validated` still passes metrics on.
                if interface is Interface.METRIC:
                    self._schedules.append(Schedule(name, scheduler, interface, ""))
                continue
            interface = _checked_interface(
                name, scheduler, interface, interval, has_epochs=has_epochs
            )
            counts_steps = interface is not Interface.METRIC
            optimizer = _optimizer_of(name, scheduler, optimizers, counts_steps=counts_steps)
            self._schedules.append(Schedule(name, scheduler, interface, optimizer))
        if interval is not None:
            _check_not_inside(schedulers)

    def after_step(self, moved: Sequence[str]) -> None:
        """Advance the schedulers of the optimizers that committed a step.

        A skipped step advances none.
        """
        for schedule in self._schedules:
            if schedule.optimizer in moved and (
                self._interval == "step" or schedule.interface is Interface.TIMM
            ):
                schedule.after_step()

    def after_epoch(self, epochs: int) -> None:
        """Advance the schedulers that count epochs.

        Args:
            epochs: How many epochs were completed, over all attempts of the run.
        """
        if self._interval is None:
            return
        for schedule in self._schedules:
            if self._interval == "epoch" or schedule.interface is Interface.TIMM:
                schedule.after_epoch(epochs)

    def validated(self, metric: SupportsFloat, mode: str, epochs: int) -> list[str]:
        """Pass a finite metric to the schedulers that need one of this mode.

        Return the names of those that changed a learning rate.
        """
        value = float(metric)
        if not math.isfinite(value):
            return []
        return [
            schedule.name for schedule in self._schedules if schedule.validated(value, mode, epochs)
        ]

    def without_metric(self) -> list[str]:
        """Return the names of the schedulers that need a metric and never got one."""
        return [schedule.name for schedule in self._schedules if schedule.lacks_metric]

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps that each schedule has counted. `state_of` holds the rest."""
        return {schedule.name: schedule.updates for schedule in self._schedules}

    def load_state_dict(self, state: Mapping[str, int], *, default: int) -> None:
        """Restore the numbers of steps.

        `default` is the number for schedules that the checkpoint lacks.
        """
        for schedule in self._schedules:
            schedule.updates = int(state.get(schedule.name, default))


def _checked_interface(
    name: str, scheduler: Any, interface: Interface | None, interval: str, *, has_epochs: bool
) -> Interface:
    """Return the interface of a scheduler.

    Raise H105 if the guard cannot drive it at this interval.
    """
    kind = type(scheduler).__name__
    if interface is None:
        raise _refused(
            f"scheduler {name!r} is a {kind}, which has no step() that can be called without an"
            " argument",
            "the guard calls step() after each step or epoch, step(metric) where it needs a metric,"
            " or step_update(n) and step(epoch) as timm does",
            "wrap it in an object with step(), state_dict() and load_state_dict(state)",
        )
    passes_metric_on = interface is Interface.TIMM and _takes_epoch_and_metric(scheduler)
    if interface is not Interface.METRIC and not passes_metric_on:
        plateau = _plateau_inside(scheduler)
        if plateau is not None:
            raise PolicyError(
                f"scheduler {name!r} is a {kind} that holds a {type(plateau).__name__}",
                limit=(
                    f"step() of a {type(plateau).__name__} needs a metric, and a {kind} does not"
                    " pass one on"
                ),
                fix=(
                    f"give Guard both schedulers separately: scheduler={{{name!r}: ..., 'plateau':"
                    " ...}."
                ),
                rule="H105",
            )
    if interface is Interface.TIMM:
        counts_epochs = _counts_epochs(scheduler)
    else:
        counts_epochs = interface is Interface.STEP and interval == "epoch"
    if counts_epochs and not has_epochs:
        raise _refused(
            f"scheduler {name!r} is a {kind} that counts epochs, and Guard has no loader",
            "the guard knows the end of an epoch only in a loop over guard.batches()",
            "pass loader= and iterate guard.batches(), or let the scheduler count steps",
        )
    return interface


def _takes_epoch_and_metric(scheduler: Any) -> bool:
    """Return whether ``step(epoch, metric)`` can be called."""
    step = getattr(scheduler, "step", None)
    if not callable(step):
        return False
    kinds = [parameter.kind for parameter in _parameters(step)]
    return (
        inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in _POSITIONAL for kind in kinds) >= 2
    )


def _counts_epochs(scheduler: Any) -> bool:
    """Return whether a scheduler with timm's interface, or one inside it, counts epochs.

    Without an attribute ``t_in_epochs`` nothing is known, and the answer is True.
    """
    if hasattr(scheduler, "t_in_epochs"):
        return bool(scheduler.t_in_epochs)
    for level in levels_inside(
        scheduler, lambda value: hasattr(value, "t_in_epochs"), most_levels=_MOST_LEVELS
    ):
        if level:
            return any(inner.t_in_epochs for inner in level)
    return True


def _optimizer_of(
    name: str, scheduler: Any, optimizers: Mapping[str, Optimizer], *, counts_steps: bool
) -> str:
    """Return the name of the optimizer that a scheduler drives.

    An empty name if it is not known and not needed.

    It is the nearest optimizer to which the attributes of the scheduler lead. If they lead to none,
    or to several at one distance, it is the optimizer with the name of the scheduler, or the only
    one.

    Args:
        name: The name of the scheduler.
        scheduler: The scheduler.
        optimizers: The optimizers of the guard by name.
        counts_steps: Whether the scheduler is advanced after steps of its optimizer, so that it
            must be known.

    Raises:
        PolicyError: H105, if the scheduler drives an optimizer that the guard does not hold, or if
            it may drive several.
    """
    ids_of_optimizers = {
        own_name: identities(optimizer) for own_name, optimizer in optimizers.items()
    }
    drives_foreign = False
    for level in levels_inside(scheduler, looks_like_an_optimizer):
        ids_in_level = set[int]().union(*map(identities, level))
        driven = [own_name for own_name, ids in ids_of_optimizers.items() if ids & ids_in_level]
        if name in driven:
            return name
        if len(driven) == 1:
            return driven[0]
        if driven:
            drives_foreign = False
            break
        drives_foreign = drives_foreign or bool(level)
    kind = type(scheduler).__name__
    if drives_foreign:
        raise _refused(
            f"scheduler {name!r} is a {kind} of an optimizer that Guard does not hold",
            "it would change the learning rates of an optimizer that no guarded step moves",
            "create the scheduler with the optimizer that Guard is given",
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


def _check_not_inside(schedulers: Mapping[str, Any]) -> None:
    """Raise H105 if the guard was given a scheduler and one inside it, which both would advance."""
    for name, scheduler in schedulers.items():
        others = {
            id(other): other_name
            for other_name, other in schedulers.items()
            if other is not scheduler
        }
        for level in levels_inside(scheduler, _is_scheduler, most_levels=_MOST_LEVELS):
            for inner in level:
                if id(inner) in others and interface_of(inner) is not Interface.METRIC:
                    raise _refused(
                        f"scheduler {others[id(inner)]!r} is inside scheduler {name!r}",
                        "the inner one would be advanced twice in each step",
                        "give Guard only the outer one",
                    )


def _refused(what: str, limit: str, fix: str) -> PolicyError:
    """Return H105 about a scheduler, with the way out that always works."""
    return PolicyError(
        what,
        limit=limit,
        fix=(
            f"{fix}; or set scheduler_interval=None and advance it yourself, after each step that"
            " was not skipped."
        ),
        rule="H105",
    )
