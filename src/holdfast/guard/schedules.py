"""Learning-rate schedulers, driven so that a schedule counts what really happened.

How a scheduler is driven is told by its methods (`way_of`), whichever library it comes from:

    step()                                after each step of its optimizer, or after each epoch
    step(metric)                          by ``guard.validated``, as ReduceLROnPlateau
    step_update(number) and step(epoch)   as timm does: after each step with its number, and after each epoch

What fits none of these is refused when the guard is made. With ``scheduler_interval=None`` the caller
drives them all.
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
from holdfast.numerics.learning_rate import rate_of

# What the argument of a scheduler that needs a metric is called.
# "interval" and "accumulated_steps" are no metrics.
_METRIC = re.compile(
    r"metric|loss|score|acc(?!um)|(?<![a-z])e?val|perf|result|monitor|reward|err|objective|criterion"
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PLAIN = (bool, int, float, str, type(None))
# Attributes between a scheduler and one that it holds. What is further away may be that of a trainer.
_MOST_LEVELS = 2


class Way(Enum):
    """How a scheduler is driven."""

    STEP = auto()  # step()
    METRIC = auto()  # step(metric)
    COUNT = auto()  # step_update(number) and step(epoch)


# --- recognised by its methods --------------------------------------------------------------------------------


def way_of(scheduler: Any) -> Way | None:
    """Return how a scheduler is driven, or None where its methods do not tell."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return Way.METRIC
    step = getattr(scheduler, "step", None)
    if callable(getattr(scheduler, "step_update", None)):
        needs = [] if step is None else required_arguments(step)
        return Way.COUNT if len(needs) <= 1 and len(required_arguments(scheduler.step_update)) <= 1 else None
    if not callable(step):
        return None
    needs = required_arguments(step)
    if not needs:
        return Way.METRIC if _is_plateau_with_optional_metric(scheduler) else Way.STEP
    if len(needs) == 1 and needs[0].kind in _POSITIONAL and _takes_metric(scheduler, needs[0].name):
        return Way.METRIC
    return None


def required_arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the arguments that a call cannot leave out; none where that cannot be known, as of a function in C."""
    return [p for p in _parameters(function) if p.default is p.empty and p.kind not in _VARIABLE]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function; behind a decorator that hides them, those of the decorated one."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    if any(parameter.kind not in _VARIABLE for parameter in parameters):
        return parameters
    bound = getattr(function, "__self__", None)
    plain = getattr(function, "__func__", function)
    hidden = contents_of_closure(plain) if isinstance(plain, FunctionType) else []
    decorated = [value for value in hidden if isinstance(value, (FunctionType, MethodType))]
    if len(decorated) != 1:
        return parameters
    own = _parameters(decorated[0])
    # A function that was decorated in its class still has `self` in front, which the method was bound to.
    return own[1:] if bound is not None and isinstance(decorated[0], FunctionType) else own


def _takes_metric(scheduler: Any, argument: str) -> bool:
    return getattr(scheduler, "mode", None) in ("min", "max") or bool(_METRIC.search(argument.lower()))


def _is_plateau_with_optional_metric(scheduler: Any) -> bool:
    """Return whether a scheduler waits for a metric that its step can be called without, to no effect."""
    if getattr(scheduler, "mode", None) not in ("min", "max"):
        return False
    positional = [parameter for parameter in _parameters(scheduler.step) if parameter.kind in _POSITIONAL]
    return bool(positional) and bool(_METRIC.search(positional[0].name.lower()))


def _plateau_inside(scheduler: Any) -> Any | None:
    """Return the nearest scheduler inside another one that needs a metric, or None."""
    visited = {id(scheduler)}
    waiting = [scheduler]
    while waiting:
        for level in levels_inside(waiting.pop(0), _is_scheduler, most_levels=_MOST_LEVELS):
            for inner in level:
                if way_of(inner) is Way.METRIC:
                    return inner
                if id(inner) not in visited:
                    visited.add(id(inner))
                    waiting.append(inner)
    return None


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, (LRScheduler, ReduceLROnPlateau))


# --- one scheduler --------------------------------------------------------------------------------------------


class Schedule:
    """One scheduler, with the way in which it is driven and the optimizer whose steps it counts."""

    def __init__(self, name: str, scheduler: Any, way: Way, optimizer: str) -> None:
        self.name = name
        self.scheduler = scheduler
        self.way = way
        self.optimizer = optimizer
        # Steps of its optimizer over all restarts, which timm's schedulers are told.
        self.updates = 0
        # What takes a metric: of timm's PlateauLRScheduler a scheduler inside.
        self._plateau = scheduler if way is Way.METRIC else None
        if way is Way.COUNT:
            self._plateau = _plateau_inside(scheduler)

    @property
    def waits(self) -> bool:
        """Whether it was never given a metric."""
        return self._plateau is not None and not getattr(self._plateau, "last_epoch", 0)

    def after_step(self) -> None:
        """Advance it by a step of its optimizer."""
        self.updates += 1
        if self.way is Way.COUNT:
            _call_with_number(self.scheduler.step_update, "num_updates", self.updates)
        elif self.way is Way.STEP:
            self.scheduler.step()

    def after_epoch(self, epochs: int) -> None:
        """Advance it by an epoch; `epochs` were completed."""
        if self.way is Way.STEP:
            self.scheduler.step()
        elif self.way is Way.COUNT and callable(getattr(self.scheduler, "step", None)):
            _call_with_number(self.scheduler.step, "epoch", epochs)

    def validated(self, metric: float, mode: str, epochs: int) -> bool:
        """Give it a metric, if it needs one of this mode; return whether it has changed a rate."""
        if self._plateau is None or getattr(self._plateau, "mode", mode) != mode:
            return False
        before = self._rates()
        if self.way is Way.METRIC:
            self.scheduler.step(metric)
        else:
            self.scheduler.step(epochs, metric)
        return self._rates() != before

    def _rates(self) -> list[float]:
        optimizer = getattr(self.scheduler, "optimizer", None)
        return [rate_of(group) for group in getattr(optimizer, "param_groups", ())]


def _call_with_number(function: Callable[..., Any], name: str, number: int) -> None:
    """Call a function with a number: by this name, or as its first argument, or without if it has none."""
    parameters = _parameters(function)
    takes_position = any(p.kind in (*_POSITIONAL, inspect.Parameter.VAR_POSITIONAL) for p in parameters)
    if not parameters:
        function()
    elif any(p.name == name for p in parameters) or not takes_position:
        function(**{name: number})
    else:
        function(number)


def state_of(scheduler: Any) -> Any:
    """Return the state of a scheduler.

    That of timm's PlateauLRScheduler lacks the bad epochs and the cooldown, which a resume would then
    count anew: of a scheduler of timm's kind with a plateau inside, the plateau's own state is added.
    """
    plateau = _plateau_inside(scheduler) if way_of(scheduler) is Way.COUNT else None
    if plateau is None:
        return scheduler.state_dict()
    attributes = [
        {name: value for name, value in vars(holder).items() if _is_plain(value)} for holder in _counted(scheduler)
    ]
    return {"own": scheduler.state_dict(), "attributes": attributes, "plateau": plateau.state_dict()}


def load_state(scheduler: Any, saved: Any) -> None:
    """Load what `state_of` has returned."""
    plateau = _plateau_inside(scheduler) if way_of(scheduler) is Way.COUNT else None
    if plateau is None:
        scheduler.load_state_dict(saved)
        return
    scheduler.load_state_dict(saved["own"])
    for holder, attributes in zip(_counted(scheduler), saved["attributes"], strict=True):
        vars(holder).update(attributes)
    plateau.load_state_dict(saved["plateau"])


def _counted(scheduler: Any) -> list[Any]:
    """Return the schedulers of timm's kind in a scheduler, itself among them."""
    inside = levels_inside(scheduler, lambda value: callable(getattr(value, "step_update", None)))
    return [scheduler, *(inner for level in inside for inner in level)]


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(item, _PLAIN) for item in value))


# --- all of a run ---------------------------------------------------------------------------------------------


class Schedules:
    """The schedulers of a run, advanced by its steps, epochs and validations.

    Args:
        schedulers: By name: that of the optimizer that they drive, or any other.
        optimizers: Those of the guard, by name.
        interval: ``Policy.scheduler_interval``: ``"step"``, ``"epoch"``, or None where the caller advances them.
        has_epochs: Whether the guard iterates a loader, and so knows where an epoch ends.

    Raises:
        PolicyError: H105, for a scheduler that cannot be driven.
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
            way = way_of(scheduler)
            if interval is None:
                # Only what takes a metric is ours then; everything else is called by its owner.
                if way is Way.METRIC:
                    self._schedules.append(Schedule(name, scheduler, way, ""))
                continue
            way = _checked_way(name, scheduler, way, interval, has_epochs=has_epochs)
            owner = _optimizer_of(name, scheduler, optimizers, counts=way is not Way.METRIC)
            self._schedules.append(Schedule(name, scheduler, way, owner))
        if interval is not None:
            _check_not_inside(schedulers)

    def after_step(self, moved: Sequence[str]) -> None:
        """Advance the schedulers of the optimizers that have moved. A skipped step is no step of a schedule."""
        for schedule in self._schedules:
            if schedule.optimizer in moved and (self._interval == "step" or schedule.way is Way.COUNT):
                schedule.after_step()

    def after_epoch(self, epochs: int) -> None:
        """Advance what counts epochs; `epochs` were completed, over all restarts."""
        if self._interval is None:
            return
        for schedule in self._schedules:
            if self._interval == "epoch" or schedule.way is Way.COUNT:
                schedule.after_epoch(epochs)

    def validated(self, metric: SupportsFloat, mode: str, epochs: int) -> list[str]:
        """Give a metric to the schedulers that need one of this mode; return who has changed a rate."""
        value = float(metric)
        if not math.isfinite(value):
            return []
        return [schedule.name for schedule in self._schedules if schedule.validated(value, mode, epochs)]

    def waiting(self) -> list[str]:
        """Return the names of the schedulers that need a metric and were never given one."""
        return [schedule.name for schedule in self._schedules if schedule.waits]

    def state_dict(self) -> dict[str, int]:
        """Return how many steps each schedule has counted; the schedulers save the rest themselves."""
        return {schedule.name: schedule.updates for schedule in self._schedules}

    def load_state_dict(self, state: Mapping[str, int], *, otherwise: int) -> None:
        """Take back what `state_dict` has returned; a checkpoint that holds no count stands for `otherwise`."""
        for schedule in self._schedules:
            schedule.updates = int(state.get(schedule.name, otherwise))


def _checked_way(name: str, scheduler: Any, way: Way | None, interval: str, *, has_epochs: bool) -> Way:
    kind = type(scheduler).__name__
    if way is None:
        raise _refused(
            f"scheduler {name!r} is a {kind}, which has no step() that can be called without an argument",
            "the guard calls step() after each step or epoch, step(metric) where it needs a metric, or "
            "step_update(n) and step(epoch) as timm does",
            "wrap it in an object with step(), state_dict() and load_state_dict(state)",
        )
    plateau = _plateau_inside(scheduler) if way is not Way.METRIC else None
    if plateau is not None and not (way is Way.COUNT and _takes_epoch_and_metric(scheduler)):
        raise PolicyError(
            f"scheduler {name!r} is a {kind} that holds a {type(plateau).__name__}",
            limit=f"the step of a {type(plateau).__name__} needs a metric, which it is not given in there",
            fix=f"give Guard both, beside each other: scheduler={{{name!r}: ..., 'plateau': ...}}.",
            rule="H105",
        )
    by_epochs = _counts_epochs(scheduler) if way is Way.COUNT else interval == "epoch" and way is Way.STEP
    if by_epochs and not has_epochs:
        raise _refused(
            f"scheduler {name!r} is a {kind} that counts epochs, and Guard has no loader",
            "the guard sees the end of an epoch only in a loop over guard.batches()",
            "pass loader= and iterate guard.batches(), or let it count steps",
        )
    return way


def _takes_epoch_and_metric(scheduler: Any) -> bool:
    """Return whether ``step(epoch, metric)`` can be called."""
    step = getattr(scheduler, "step", None)
    if not callable(step):
        return False
    kinds = [parameter.kind for parameter in _parameters(step)]
    return inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in _POSITIONAL for kind in kinds) >= 2


def _counts_epochs(scheduler: Any) -> bool:
    """Return whether a scheduler of timm's kind, or one inside, counts epochs; one that does not say may do so."""
    if hasattr(scheduler, "t_in_epochs"):
        return bool(scheduler.t_in_epochs)
    for level in levels_inside(scheduler, lambda value: hasattr(value, "t_in_epochs"), most_levels=_MOST_LEVELS):
        if level:
            return any(inner.t_in_epochs for inner in level)
    return True


def _optimizer_of(name: str, scheduler: Any, optimizers: Mapping[str, Optimizer], *, counts: bool) -> str:
    """Return the name of the optimizer whose steps a scheduler counts; empty for one that counts none.

    It is the one that the scheduler refers to. If it refers to none or to several, the scheduler must be
    named after it, or it must be the only one.
    """
    ids = {owner: identities(optimizer) for owner, optimizer in optimizers.items()}
    strangers = 0
    for level in levels_inside(scheduler, looks_like_an_optimizer):
        near = [identities(optimizer) for optimizer in level]
        driven = [owner for owner, own in ids.items() if any(own & other for other in near)]
        if len(driven) == 1 or name in driven:
            return name if name in driven else driven[0]
        if driven:
            strangers = 0
            break
        strangers += len(level)
    kind = type(scheduler).__name__
    if strangers:
        raise _refused(
            f"scheduler {name!r} is a {kind} of an optimizer that Guard was not given",
            "it would change the rates of an optimizer that no guarded step moves",
            "make the scheduler of the optimizer that Guard is given",
        )
    if name in optimizers:
        return name
    if len(optimizers) == 1:
        return next(iter(optimizers))
    if not counts:
        return ""
    raise _refused(
        f"scheduler {name!r} is a {kind} that may drive any of the optimizers {', '.join(map(repr, optimizers))}",
        "it is advanced after the steps of one of them",
        "name it after that one, scheduler={'generator': ...}",
    )


def _check_not_inside(schedulers: Mapping[str, Any]) -> None:
    """Raise H105 for a scheduler that is given beside another one that holds it: both would advance it."""
    for name, scheduler in schedulers.items():
        others = {id(other): other_name for other_name, other in schedulers.items() if other is not scheduler}
        for level in levels_inside(scheduler, _is_scheduler, most_levels=_MOST_LEVELS):
            for inner in level:
                if id(inner) in others and way_of(inner) is not Way.METRIC:
                    raise _refused(
                        f"scheduler {others[id(inner)]!r} is inside scheduler {name!r}",
                        "both would be advanced, and it would count each step twice",
                        "give Guard the outer one only",
                    )


def _refused(what: str, limit: str, fix: str) -> PolicyError:
    return PolicyError(
        what,
        limit=limit,
        fix=f"{fix}; or set scheduler_interval=None and advance it yourself, after each result that is not skipped.",
        rule="H105",
    )
