"""Save and load the state of a scheduler, including values that its ``state_dict`` lacks.

The ``state_dict`` of timm's PlateauLRScheduler lacks the numbers of bad epochs and of cooldown
epochs, so a resumed run would count them from 0. If a scheduler with timm's interface contains a
plateau scheduler, we therefore also save the plateau's own state and the plain attributes of both.

The number of steps that each scheduler has counted is saved by `Schedules.state_dict`.
"""

from __future__ import annotations

from typing import Any

from holdfast.guard.reachable import levels_inside
from holdfast.guard.scheduler_interface import Interface, interface_of, plateau_inside

_PLAIN_TYPES = (bool, int, float, str, type(None))


def state_of(scheduler: Any) -> Any:
    """Return a scheduler's state for a checkpoint, to be loaded with `load_state`."""
    plateau = _plateau_inside_timm(scheduler)
    if plateau is None:
        return scheduler.state_dict()
    attributes = [_plain_attributes(inner) for inner in _timm_schedulers_in(scheduler)]
    return {
        "own": scheduler.state_dict(),
        "attributes": attributes,
        "plateau": plateau.state_dict(),
    }


def load_state(scheduler: Any, saved: Any) -> None:
    """Restore a scheduler from the return value of `state_of`."""
    plateau = _plateau_inside_timm(scheduler)
    if plateau is None:
        scheduler.load_state_dict(saved)
        return
    scheduler.load_state_dict(saved["own"])
    for inner, attributes in zip(_timm_schedulers_in(scheduler), saved["attributes"], strict=True):
        vars(inner).update(attributes)
    plateau.load_state_dict(saved["plateau"])


def _plateau_inside_timm(scheduler: Any) -> Any | None:
    """Return the plateau scheduler inside a scheduler with timm's interface, or None."""
    if interface_of(scheduler) is not Interface.TIMM:
        return None
    return plateau_inside(scheduler)


def _timm_schedulers_in(scheduler: Any) -> list[Any]:
    """Return the scheduler itself and all schedulers inside it that have timm's interface."""
    levels = levels_inside(scheduler, lambda value: callable(getattr(value, "step_update", None)))
    return [scheduler, *(inner for level in levels for inner in level)]


def _plain_attributes(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's attributes that are numbers, strings, None, or lists of these."""
    return {name: value for name, value in vars(scheduler).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, _PLAIN_TYPES) for item in value)
    return isinstance(value, _PLAIN_TYPES)
