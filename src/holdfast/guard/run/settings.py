"""Compare the current settings of optimizers and schedulers with those at the start of the run."""

from __future__ import annotations

from typing import Any

from holdfast.core.events import run_events
from holdfast.guard.optimizer_state import IMPLEMENTATION_FLAGS
from holdfast.guard.parts import Parts
from holdfast.guard.record import RunRecord
from holdfast.guard.schedule_length import lengths_of

# The maximum number of names in one event.
_MOST_NAMES = 10


class RunSettings:
    """Compares the script's settings with the settings at the start of the run.

    Args:
        parts: The models, optimizers and further state of the run.
        record: The recording that receives events about differences.
    """

    def __init__(self, parts: Parts, record: RunRecord) -> None:
        self._parts = parts
        self._record = record
        self._begun_with = parts.settings()
        # The number of parameter groups of all optimizers. None once a change was reported.
        self._groups: int | None = len(parts.rates())

    @property
    def begun_with(self) -> dict[str, Any]:
        """Return the settings at the start of the run, keyed as in `Parts.settings`."""
        return self._begun_with

    def restore(self, begun_with: dict[str, Any], *, is_reported: bool) -> None:
        """Adopt the settings in a checkpoint, and report those that the script has changed.

        The settings in the checkpoint override those in the script, except for the lengths of
        schedules and the flags that only choose the implementation of an optimizer.

        Args:
            begun_with: The settings in the checkpoint, which are those at the start of the run.
            is_reported: Whether to report the settings that the script has changed.
        """
        own_settings = self._begun_with
        own_flags = {
            name: value for name, value in own_settings.items() if _is_implementation_flag(name)
        }
        own_lengths = {
            name: own_settings[name] for name in self._length_names() if name in own_settings
        }
        self._begun_with = {**begun_with, **own_flags, **own_lengths}
        restored = []
        replaced = []
        for name, value in begun_with.items():
            if name not in own_settings or own_settings[name] == value or name in own_lengths:
                continue
            if name in own_flags:
                replaced.append(f"{name}: {_text(value)} before, now {_text(own_settings[name])}")
            else:
                restored.append(f"{name}: {value!r} stays, not {own_settings[name]!r}")
        if restored and is_reported:
            self._record.emit(run_events.SettingsKept(changed=tuple(restored[:_MOST_NAMES])))
        if replaced:
            self._record.emit(
                run_events.ImplementationChanged(changed=tuple(replaced[:_MOST_NAMES]))
            )

    def _length_names(self) -> list[str]:
        """Return the names of the settings that are lengths of schedules."""
        return [
            f"scheduler {name}.{key}"
            for name, scheduler in self._parts.schedulers.items()
            for key in lengths_of(scheduler)
        ]

    def report_changed_groups(self) -> None:
        """Report once if the number of parameter groups has changed since the guard was created."""
        if self._groups is not None and self._groups != len(self._parts.rates()):
            self._groups = None
            self._record.emit(run_events.GroupsChanged())


def _is_implementation_flag(name: str) -> bool:
    """Return whether a setting, such as ``"optimizer.0.fused"``, only chooses an implementation."""
    return not name.startswith("scheduler ") and name.rpartition(".")[2] in IMPLEMENTATION_FLAGS


def _text(flag: object) -> str:
    """Return the value of a flag as text. With None, torch chooses an implementation."""
    return "unset" if flag is None else str(flag)
