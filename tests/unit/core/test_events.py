"""Events and decisions: frozen, named after their class, and made of JSON values."""

from __future__ import annotations

import dataclasses
import json

import pytest

from holdfast.core import events
from holdfast.core.events import Decision, Event, Grow, Recompute, Retry, RollBack, SkipStep, Split, Stop

_ALL: list[Decision] = [
    Retry(reason="r", promise="bit-exact"),
    Recompute(reason="r", promise="bit-exact", modules=("layers.0", "layers.1")),
    Split(reason="r", promise="equal up to rounding", micro_batch_size=4),
    Grow(reason="r", promise="equal up to rounding", micro_batch_size=None),
    SkipStep(reason="r", promise="changes training"),
    RollBack(reason="r", promise="changes training", rewind_data=False),
    Stop(reason="r", promise="bit-exact"),
]
_NAMES = ["retry", "recompute", "split", "grow", "skip_step", "roll_back", "stop"]


def test_the_list_of_this_file_holds_every_decision() -> None:
    """A new decision has to be added to the tests below."""
    found = {kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Decision)}
    assert found - {Decision} == {type(decision) for decision in _ALL}


@pytest.mark.parametrize(("decision", "name"), list(zip(_ALL, _NAMES, strict=True)))
def test_a_decision_is_named_after_its_class(decision: Decision, name: str) -> None:
    """The kind of a decision's event is its class name in snake case."""
    assert decision.name() == type(decision).name() == name


@pytest.mark.parametrize("decision", _ALL)
def test_the_facts_of_a_decision_are_its_fields_as_json(decision: Decision) -> None:
    """What a decision says can be written down without losing a field."""
    facts = decision.facts()
    assert set(facts) == {field.name for field in dataclasses.fields(decision)}
    assert json.loads(json.dumps(facts))["reason"] == "r"


@pytest.mark.parametrize("record", [*_ALL, Event(kind="k", global_step=1, unix_seconds=0.0)])
def test_records_are_frozen_and_keyword_only(record: Decision | Event) -> None:
    """Nobody can change what was decided, nor mix up the order of its fields."""
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, "changed")
    with pytest.raises(TypeError):
        type(record)(*dataclasses.astuple(record))
    assert not hasattr(record, "__dict__")


def test_an_event_reads_as_one_line() -> None:
    """The text of an event names its step, its kind and its facts."""
    event = Event(kind="out_of_memory", global_step=7, unix_seconds=1.5, data={"bytes": 3, "where": "cpu"})
    assert str(event) == "[step 7] out_of_memory: bytes=3, where='cpu'"
