"""`Event`: one thing that happened in a run, as it is read from a recording.

The sentence for each kind of event is in ``decisions``, ``run_events`` and ``process_events``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.events.data import KINDS, EventData, key_value_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened in a run.

    ``str(event)`` is the step and a sentence about the event.

    Args:
        kind: Short name such as ``"out_of_memory"``, ``"skip_step"``, ``"checkpoint_saved"``.
        global_step: Number of optimizer steps committed before the event.
        unix_seconds: Wall-clock time of the event.
        data: The fields of the event, as JSON values.
    """

    kind: str
    global_step: int
    unix_seconds: float
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"step {self.global_step}: {self.sentence()}"

    def sentence(self) -> str:
        """Return what happened on one line, without the step.

        The result is ``kind: key=value`` if a newer version wrote the event or its fields are
        damaged.
        """
        data_class = event_kinds().get(self.kind)
        if data_class is not None:
            try:
                return _one_line(str(data_class.from_facts(self.data)))
            except Exception:  # noqa: BLE001, S110 - the fields come from a file, maybe damaged
                pass
        return _one_line(key_value_text(self.kind, self.data))


def event_kinds() -> Mapping[str, type[EventData]]:
    """Return all event classes, by kind.

    The classes are imported only when needed: every process of a supervised run records events, but
    few processes print any.
    """
    # Importing the modules registers their kinds.
    from holdfast.core.events import decisions, process_events, run_events  # noqa: F401

    return KINDS


def _one_line(text: str) -> str:
    return " ".join(text.split())
