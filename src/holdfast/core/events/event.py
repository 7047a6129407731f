"""`Event`: something that happened in a run, as read from a recording.

The classes that describe each kind of event are in ``decisions``, ``run_events`` and
``process_events``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.events.data import KINDS, EventData, key_value_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a run.

    ``str(event)`` consists of the step and a sentence about the event.

    Args:
        kind: The kind of event, such as ``"out_of_memory"``, ``"skip_step"`` or
            ``"checkpoint_saved"``.
        global_step: The number of optimizer steps committed before the event.
        unix_seconds: The wall-clock time of the event, in seconds since 1970.
        data: The facts about the event, as JSON values. Their names depend on the kind.
    """

    kind: str
    global_step: int
    unix_seconds: float
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"step {self.global_step}: {self.sentence()}"

    def sentence(self) -> str:
        """Return a one-line description of the event, without the step.

        If the kind is unknown because a newer version wrote the event, or if the data is damaged,
        the description is ``kind: key=value, ...``.
        """
        data_class = event_kinds().get(self.kind)
        if data_class is not None:
            try:
                return _one_line(str(data_class.from_facts(self.data)))
            except Exception:  # noqa: BLE001, S110 - the fields come from a file that may be damaged
                pass
        return _one_line(key_value_text(self.kind, self.data))


def event_kinds() -> Mapping[str, type[EventData]]:
    """Return all event classes, by kind.

    The classes are imported only when this function is called, because every process of a
    supervised run records events, but few processes print them.
    """
    # Importing these modules registers the kinds that they define.
    from holdfast.core.events import decisions, process_events, run_events  # noqa: F401

    return KINDS


def _one_line(text: str) -> str:
    return " ".join(text.split())
