"""The black box: whatever is written and whatever happens to the file, the reader gives what is
whole, in order.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.events.event import Event
from holdfast.recorder.black_box import EVENTS_FILE, PART, PART_BYTES, BlackBox
from holdfast.recorder.reader import read_events, read_ring
from holdfast.recorder.ring import HEADER_BYTES, RingWriter, slot_struct
from holdfast.recorder.scalars import LONGEST_NAME, SCALARS_FILE, Scalars, check_scalars, scalars_of

_SETTINGS = settings(deadline=None, max_examples=80)
_JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=200)
    ),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)
_FACTS = st.dictionaries(st.text(max_size=5), _JSON, max_size=4)
_PAYLOAD = 8
_SLOT_BYTES = slot_struct(_PAYLOAD).size
_EVENT_SLOT_BYTES = slot_struct(PART.size + PART_BYTES).size


def _write(path: Path, sessions: list[int], capacity: int) -> int:
    """Append records 1, 2, ... in several processes' turns; return the last number."""
    number = 0
    for records in sessions:
        ring = RingWriter(path, payload_bytes=_PAYLOAD, capacity=capacity)
        for _ in range(records):
            number += 1
            ring.append(number.to_bytes(_PAYLOAD, "little"))
        ring.close()
    return number


def _read(path: Path) -> list[int]:
    records = read_ring(path)
    numbers = [int.from_bytes(record.payload, "little") for record in records]
    assert [record.sequence for record in records] == numbers
    return numbers


_SESSIONS = st.lists(st.integers(0, 25), min_size=1, max_size=4)


@_SETTINGS
@given(_SESSIONS, st.integers(1, 20), st.integers(0, 24))
def test_a_torn_slot_costs_one_record(sessions: list[int], capacity: int, slot: int) -> None:
    """Whichever slot was torn by a kill, all other records are read, and a next writer goes on
    above them.
    """
    slot %= capacity
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "ring")
        last = _write(path, sessions, capacity)
        with path.open("r+b") as file:  # the write got as far as the first number
            file.seek(HEADER_BYTES + slot * _SLOT_BYTES)
            file.write((2**40 + last).to_bytes(8, "little"))
        kept = [
            number
            for number in range(max(1, last - capacity + 1), last + 1)
            if number % capacity != slot
        ]
        assert _read(path) == kept
        ring = RingWriter(path, payload_bytes=_PAYLOAD, capacity=capacity)
        ring.append(b"")
        ring.close()
        assert read_ring(path)[-1].sequence == max(kept, default=0) + 1


@_SETTINGS
@given(_SESSIONS, st.integers(1, 20), st.integers(0, HEADER_BYTES + 20 * _SLOT_BYTES))
def test_a_cut_file_gives_what_is_left(sessions: list[int], capacity: int, size_bytes: int) -> None:
    """Cut at any byte or not at all, the file gives the newest records whose slots are whole, in
    order.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "ring")
        last = _write(path, sessions, capacity)
        size_bytes = min(size_bytes, path.stat().st_size)
        os.truncate(path, size_bytes)
        whole_slots = (size_bytes - HEADER_BYTES) // _SLOT_BYTES
        newest = range(max(1, last - capacity + 1), last + 1)
        assert _read(path) == [number for number in newest if number % capacity < whole_slots]


def record(directory: str, *events: Event) -> None:
    box = BlackBox(Path(directory))
    for event in events:
        box.event(event)
    box.close()


@_SETTINGS
@given(
    st.lists(_FACTS, max_size=5),
    st.text(min_size=1, max_size=20),
    st.integers(0, 2**60),
    st.floats(0, 1e10),
)
def test_any_facts_come_back(
    facts: list[dict[str, Any]], kind: str, step: int, seconds: float
) -> None:
    """Events with any JSON facts are read as they were written, in order."""
    events = [Event(kind=kind, global_step=step, unix_seconds=seconds, data=data) for data in facts]
    with tempfile.TemporaryDirectory() as directory:
        record(directory, *events)
        assert read_events(Path(directory)) == events


@settings(deadline=None, max_examples=25)
@given(st.text(min_size=1, max_size=20), st.integers(1_000, 60_000))
def test_long_facts_are_cut_but_readable(pattern: str, length: int) -> None:
    """However long a text and whatever its letters, the event is read.

    Whole, or its beginning under ``cut``.
    """
    text = (pattern * length)[:length]
    event = Event(kind="k", global_step=1, unix_seconds=0.0, data={"text": text})
    after = Event(kind="after", global_step=2, unix_seconds=0.0)
    with tempfile.TemporaryDirectory() as directory:
        record(directory, event, after)
        found, following = read_events(Path(directory))
    assert following == after
    assert (found.kind, found.global_step) == ("k", 1)
    if len(json.dumps(text)) < 30_000:
        assert found == event
    elif found != event:
        cut = found.data["cut"]
        assert len(cut) >= 1000
        assert str({"text": text}).startswith(cut)


@_SETTINGS
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.sets(st.integers(0, 40), max_size=4))
def test_torn_parts_cost_only_the_events_they_belong_to(parts: list[int], torn: set[int]) -> None:
    """With any slots of the ring of events torn, exactly the events without a torn part are
    read, in order.
    """
    events = [
        Event(
            kind="k",
            global_step=number,
            unix_seconds=0.0,
            data={"text": "x" * (PART_BYTES * (count - 1))},
        )
        for number, count in enumerate(parts)
    ]
    with tempfile.TemporaryDirectory() as directory:
        record(directory, *events)
        with Path(directory, EVENTS_FILE).open("r+b") as file:
            for slot in torn:
                file.seek(HEADER_BYTES + slot * _EVENT_SLOT_BYTES)
                file.write((2**40).to_bytes(8, "little"))
        whole, first = [], 1
        for event, count in zip(events, parts, strict=True):
            if not torn & set(range(first, first + count)):
                whole.append(event)
            first += count
        assert read_events(Path(directory)) == whole


_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: len(name.encode()) <= LONGEST_NAME
)
_STEPS = st.integers(-(2**62), 2**62)


@_SETTINGS
@given(
    st.lists(
        st.tuples(_NAMES, st.floats(), _STEPS, st.none() | st.integers(0, 2**31 - 1)), max_size=20
    )
)
def test_any_number_comes_back_under_its_name(
    logged: list[tuple[str, float, int, int | None]],
) -> None:
    """Whatever the name, the number, the step and the epoch, all are read as they were logged,
    in order.
    """
    with tempfile.TemporaryDirectory() as directory:
        scalars = Scalars(lambda: Path(directory), lambda event: None)
        for name, value, step, epoch in logged:
            scalars.write(check_scalars({name: value}, "", {}), step, epoch)
        scalars.close()
        read = scalars_of(read_ring(Path(directory, SCALARS_FILE)))
    found = [(each.name, struct.pack("d", each.value), each.step, each.epoch) for each in read]
    assert found == [
        (name, struct.pack("d", value), step, epoch) for name, value, step, epoch in logged
    ]
