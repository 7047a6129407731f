"""Events and decisions: frozen, named after their class, and made of JSON values."""

from __future__ import annotations

import json

import pytest

from holdfast.core.events import decisions, process_events, run_events
from holdfast.core.events.data import EventData
from holdfast.core.events.event import Event, event_kinds


def test_every_class_has_a_kind_of_its_own() -> None:
    """What a part records is documented.

    `emit` takes such a class only, which mypy checks, and no two are alike.
    """
    classes = [
        value
        for module in (decisions, run_events, process_events)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, EventData) and value.kind
    ]
    assert {value.kind: value for value in classes} == event_kinds()
    assert len(event_kinds()) == len({*classes})


def test_facts_are_the_fields_as_json() -> None:
    """What an event says can be written down without losing a field; defaults are there too."""
    said = run_events.SaveFailed(error="OSError: full", checkpoint="step-3")
    assert json.loads(json.dumps(said.facts())) == {
        "error": "OSError: full",
        "checkpoint": "step-3",
        "seconds": None,
    }


def test_data_is_frozen_and_compared_by_value() -> None:
    """It behaves like a frozen dataclass with keyword arguments."""
    data = run_events.RolledBack(from_step=5, to_step=4)
    assert data == run_events.RolledBack(from_step=5, to_step=4)
    assert data != run_events.StepsLeftBehind(from_step=5, to_step=4)
    assert hash(data) == hash(run_events.RolledBack(from_step=5, to_step=4))
    assert repr(data) == "RolledBack(from_step=5, to_step=4)"
    with pytest.raises(AttributeError):
        data.to_step = 3
    for arguments in ({"from_step": 5}, {"from_step": 5, "to_step": 4, "other": 3}):
        with pytest.raises(TypeError, match="RolledBack"):
            run_events.RolledBack(**arguments)


def test_an_event_of_an_unknown_kind_shows_its_facts() -> None:
    """A newer version may have written it; facts that are not known are left out."""
    event = Event(
        kind="invented",
        global_step=7,
        unix_seconds=1.5,
        data={"bytes": 3, "where": "cpu", "rule": None},
    )
    assert str(event) == "step 7: invented: bytes=3, where='cpu'"
