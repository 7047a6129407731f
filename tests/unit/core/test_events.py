"""Events and decisions: frozen, named after their class, and made of JSON values."""

from __future__ import annotations

import json

from holdfast.core.events import event as events
from holdfast.core.events import process_events, run_events
from holdfast.core.events.event import Event, EventData


def test_every_class_has_a_kind_of_its_own() -> None:
    """What a part records is documented.

    `emit` takes such a class only, which mypy checks, and no two are alike.
    """
    classes = [
        each
        for module in (events, run_events, process_events)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, EventData) and each.kind
    ]
    assert {each.kind: each for each in classes} == events.KINDS
    assert len(events.KINDS) == len({*classes})


def test_facts_are_the_fields_as_json() -> None:
    """What an event says can be written down without losing a field; defaults are there too."""
    said = run_events.SaveFailed(error="OSError: full", checkpoint="step-3")
    assert json.loads(json.dumps(said.facts())) == {
        "error": "OSError: full",
        "checkpoint": "step-3",
        "seconds": None,
    }


def test_an_event_reads_as_one_line() -> None:
    """The text of an event names its step, its kind and the facts that are known."""
    event = Event(
        kind="out_of_memory",
        global_step=7,
        unix_seconds=1.5,
        data={"bytes": 3, "where": "cpu", "rule": None},
    )
    assert str(event) == "[step 7] out_of_memory: bytes=3, where='cpu'"
