"""Find state of schedulers and optimizers that no checkpoint holds.

Examples are a counter that is missing from a ``state_dict``, and a scheduler that was not passed to
the guard. After a resume, such state silently restarts from its initial value, so the learning rate
may return to its value in the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.guard.parts import Parts
from holdfast.guard.scheduler_state import state_of
from holdfast.guard.schedules import nearest_optimizers

# The search for a number in a state stops after this many values. This covers the parameter groups,
# but not the per-parameter state of a large model.
_MOST_VALUES = 10_000


def optimizer_of_unkept_scheduler(parts: Parts) -> str | None:
    """Return the name of an optimizer that an unknown torch scheduler drives, or None.

    A scheduler is known if it was passed to the guard, directly or inside another object.

    Args:
        parts: The objects of the run.
    """
    with_scheduler = {
        name
        for holder in (*parts.schedulers.values(), *parts.states.values())
        for name in nearest_optimizers(holder, parts.optimizers)
    }
    for name, optimizer in parts.optimizers.items():
        # torch's schedulers replace the `step` of their optimizer by a wrapper with this mark.
        has_scheduler = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if has_scheduler and name not in with_scheduler:
            return name
    return None


class UnkeptNumbers:
    """Finds numeric attributes that change during training but are missing from checkpoints.

    Args:
        parts: The objects of the run, whose schedulers and optimizers have not been stepped yet.
    """

    def __init__(self, parts: Parts) -> None:
        self._holders: dict[str, Any] = {
            f"scheduler {name!r}": value for name, value in parts.schedulers.items()
        }
        self._holders |= {f"optimizer {name!r}": value for name, value in parts.optimizers.items()}
        self._before = {name: _numbers_of(holder) for name, holder in self._holders.items()}

    def find(self) -> tuple[str, str] | None:
        """Return the first attribute that has changed and is not saved, or None.

        An attribute counts as saved if its value appears anywhere in the ``state_dict``.

        Returns:
            A description of the scheduler or optimizer, such as ``"scheduler 'optimizer'"``, and
            the name of the attribute.
        """
        for name, holder in self._holders.items():
            before = self._before[name]
            changed = {
                key: value
                for key, value in _numbers_of(holder).items()
                if before.get(key, value) != value
            }
            if not changed:
                continue
            state = state_of(holder) if name.startswith("scheduler") else holder.state_dict()
            saved_values = set(_values_in(state))
            for key, value in changed.items():
                if value not in saved_values:
                    return name, key
        return None


def _numbers_of(holder: Any) -> dict[str, float]:
    attributes = getattr(holder, "__dict__", {})
    return {name: value for name, value in attributes.items() if type(value) in (int, float)}


def _values_in(state: Any) -> Iterator[float]:
    """Yield the numbers in a state. Only its first `_MOST_VALUES` values are searched."""
    waiting = [state]
    values = 0
    while waiting and values < _MOST_VALUES:
        values += 1
        value = waiting.pop()
        if type(value) in (int, float):
            yield value
        elif isinstance(value, torch.Tensor):
            if value.numel() == 1 and value.device.type == "cpu":
                yield value.item()
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
