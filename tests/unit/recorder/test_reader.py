"""The reader: what is whole is read, what is not is passed over, and what is foreign is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import RunDirectoryError
from holdfast.core.events.event import Event
from holdfast.recorder.black_box import EVENTS_FILE, PART, PART_BYTES, STEP, STEPS_FILE, BlackBox
from holdfast.recorder.reader import read_events, read_ring, read_steps
from holdfast.recorder.ring import RingWriter


def _record(directory: Path, *sizes: int) -> list[Event]:
    """Write one event for each size; its facts take so many parts of the ring."""
    box = BlackBox(directory)
    events = [
        Event(
            kind="k",
            global_step=number,
            unix_seconds=0.0,
            data={"text": "x" * (PART_BYTES * (size - 1))},
        )
        for number, size in enumerate(sizes, start=1)
    ]
    for event in events:
        box.event(event)
    box.close()
    return events


def test_a_directory_without_a_recording_is_empty(tmp_path: Path) -> None:
    """Missing files are no error: a run that never started recorded nothing."""
    assert read_steps(tmp_path) == []
    assert read_events(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "words"), [(b"something else ", "recording"), (b"HOLDRING\2\0\0\0", "version 2")]
)
def test_what_is_no_recording_or_a_newer_one_is_refused(
    damage: bytes, words: str, tmp_path: Path
) -> None:
    """It is an H305 that names the file, instead of a guess."""
    _record(tmp_path, 1)
    with (tmp_path / EVENTS_FILE).open("r+b") as file:
        file.write(damage)
    with pytest.raises(RunDirectoryError, match=words) as caught:
        read_events(tmp_path)
    assert caught.value.rule == "H305"
    assert str(tmp_path / EVENTS_FILE) in caught.value.what


def test_an_event_whose_beginning_was_overwritten_is_passed_over(tmp_path: Path) -> None:
    """In a ring that wrapped, the first readable event is a whole one."""
    events = _record(tmp_path, *[3] * 700)  # 2100 parts in a ring of 2048
    assert read_events(tmp_path) == events[-682:]
    assert len(read_ring(tmp_path / EVENTS_FILE)) == 2048


def test_payloads_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    """A slot that is whole and holds nonsense does not keep the others from being read."""
    steps = RingWriter(tmp_path / STEPS_FILE, payload_bytes=STEP.size, capacity=32_768)
    steps.append(STEP.pack(0xFFFF, 0, 1, 1, 0.0, 0.0, 0.0))
    steps.append(STEP.pack(2, 0, 1, 1, 0.0, 0.0, 0.0))
    steps.close()
    assert [record.global_step for record in read_steps(tmp_path)] == [1]
    events = RingWriter(
        tmp_path / EVENTS_FILE, payload_bytes=PART.size + PART_BYTES, capacity=2_048
    )
    for body in (b"\xff\xfe{", b"5", b"[1, 2]", b'["kind", 1, 2.0, [3]]', b'["kind", 1, 2.0, {}]'):
        events.append(PART.pack(0, 1) + body)
    events.close()
    assert [event.kind for event in read_events(tmp_path)] == ["kind"]


def test_an_event_that_cannot_be_written_down_is_recorded_all_the_same(tmp_path: Path) -> None:
    """Facts that are no JSON never stop the run that they are about.

    A path and an exception become their texts.
    """
    box = BlackBox(tmp_path)
    circle: list[object] = []
    circle.append(circle)
    for facts in (
        {"path": Path("/x"), "error": ValueError("bad")},
        {"a": {(1, 2): 3}},
        {"a": circle},
    ):
        box.event(Event(kind="odd", global_step=1, unix_seconds=0.0, data=facts))
    box.close()
    texts, *unreadable = [event.data for event in read_events(tmp_path)]
    assert (texts, unreadable) == ({"path": "/x", "error": "bad"}, [{"unreadable": ["a"]}] * 2)
