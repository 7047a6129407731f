"""Compare the current settings of optimizers and schedulers with those at the start of the run."""

from __future__ import annotations

from typing import Any

from holdfast.core.events import run_events
from holdfast.guard.parts import Parts
from holdfast.guard.record import RunRecord

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

    def restore(self, begun_with: dict[str, Any]) -> None:
        """Adopt the settings in a checkpoint, and report those that the script has changed.

        The settings in the checkpoint override those in the script.

        Args:
            begun_with: The settings in the checkpoint, which are those at the start of the run.
        """
        own_settings = self._begun_with
        self._begun_with = begun_with
        changed = [
            f"{name}: {value!r} stays, not {own_settings[name]!r}"
            for name, value in begun_with.items()
            if name in own_settings and own_settings[name] != value
        ]
        if changed:
            self._record.emit(run_events.SettingsKept(changed=tuple(changed[:_MOST_NAMES])))

    def report_changed_groups(self) -> None:
        """Report once if the number of parameter groups has changed since the guard was created."""
        if self._groups is not None and self._groups != len(self._parts.rates()):
            self._groups = None
            self._record.emit(run_events.GroupsChanged())
