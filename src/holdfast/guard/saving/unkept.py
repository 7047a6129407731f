"""Numbers that a scheduler or an optimizer counts in, and that its ``state_dict`` leaves out.

A resume would begin them anew, and nothing else would say so: the learning rate goes back to that
of the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.guard.parts import Parts
from holdfast.guard.scheduler_state import state_of

# A number is looked for in the parameter groups, and not in the state of each of many parameters.
_MOST_VALUES = 10_000


class UnkeptNumbers:
    """Finds attributes that change in training and are in no checkpoint.

    Args:
        parts: Those of the run, as they are before training.
    """

    def __init__(self, parts: Parts) -> None:
        self._holders: dict[str, Any] = {
            f"scheduler {name!r}": value for name, value in parts.schedulers.items()
        }
        self._holders |= {f"optimizer {name!r}": value for name, value in parts.optimizers.items()}
        self._before = {name: _numbers_of(holder) for name, holder in self._holders.items()}

    def find(self) -> tuple[str, str] | None:
        """Return a scheduler or optimizer, and its attribute that has changed and is not saved.

        None without one.

        A number counts as saved if the state holds an equal one under any name.
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
            saved = set(
                _values_in(
                    state_of(holder) if name.startswith("scheduler") else holder.state_dict()
                )
            )
            for key, value in changed.items():
                if value not in saved:
                    return name, key
        return None


def _numbers_of(holder: Any) -> dict[str, float]:
    attributes = getattr(holder, "__dict__", {})
    return {name: value for name, value in attributes.items() if type(value) in (int, float)}


def _values_in(state: Any) -> Iterator[float]:
    """Yield the numbers in a tree of state, up to some."""
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
