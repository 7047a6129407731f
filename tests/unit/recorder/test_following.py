"""Following rings: everything once, nothing twice, whatever the writer and the reader do in
between.
"""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.events.event import Event
from holdfast.recorder.black_box import EVENTS_FILE, PART_BYTES, STEPS_FILE, BlackBox, StepMark
from holdfast.recorder.following import EventFollower, RingFollower, SampleFollower
from holdfast.recorder.progress import SampleRing, StepSample, read_samples
from holdfast.recorder.reader import read_events
from holdfast.recorder.ring import HEADER_BYTES, RingWriter, slot_struct

_SLOT_BYTES = slot_struct(4).size


def _sample(step: int, loss: float) -> StepSample:
    return StepSample(
        step=step,
        micro_steps=2,
        loss=loss,
        grad_norm=0.5,
        learning_rate=1e-3,
        seconds=0.1,
        wait_seconds=0.01,
        host_bytes=1,
        device_allocated_bytes=2,
        device_reserved_bytes=3,
        device_peak_bytes=4,
    )


def _append(ring: SampleRing, sample: StepSample) -> None:
    # Without the time, which the ring sets, and the optimizer.
    ring.write(*sample[:-2])


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.integers(0, 25), max_size=12), looks_first=st.booleans())
def test_each_record_is_read_once_or_counted_as_lost(
    tmp_path_factory, batches: list[int], looks_first: bool
) -> None:
    """Records arrive in order without gaps, and those that a small ring overwrote between two
    looks are counted.
    """
    path = tmp_path_factory.mktemp("ring") / "r"
    ring, follower = RingWriter(path, payload_bytes=4, capacity=8), RingFollower(path)
    if looks_first:
        assert follower.records() == []
    written, found = 0, []
    for batch in batches:
        for _ in range(batch):
            written += 1
            ring.append(written.to_bytes(4, "little"))
        fresh = follower.records()
        assert [record.sequence for record in fresh] == list(
            range(written - min(batch, 8) + 1, written + 1)
        )
        found += [int.from_bytes(record.payload, "little") for record in fresh]
    ring.close()
    assert found == sorted(set(found))
    assert len(found) + follower.lost == written


def test_a_follower_goes_on_after_the_writer_was_killed_and_continued(tmp_path: Path) -> None:
    """A slot torn by a kill is passed over, and the record that replaces it is read."""
    path = tmp_path / "r"
    ring, follower = RingWriter(path, payload_bytes=4, capacity=8), RingFollower(path)
    ring.append(b"one ")
    assert len(follower.records()) == 1
    ring.append(b"torn")
    ring.close()
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 3 * _SLOT_BYTES - 8)
        file.write(bytes(8))
    assert follower.records() == []
    ring = RingWriter(path, payload_bytes=4, capacity=8)
    ring.append(b"two ")
    ring.append(b"thre")
    assert [record.payload for record in follower.records()] == [b"two ", b"thre"]
    assert follower.lost == 0


def test_a_ring_of_another_layout_is_followed_from_its_beginning(tmp_path: Path) -> None:
    """When a writer puts the old file aside, the new one is read from its first record."""
    path = tmp_path / "r"
    follower = RingFollower(path)
    ring = RingWriter(path, payload_bytes=4, capacity=8)
    for _ in range(3):
        ring.append(b"old ")
    assert len(follower.records()) == 3
    ring = RingWriter(path, payload_bytes=8, capacity=8)
    ring.append(b"new form")
    assert [record.payload for record in follower.records()] == [b"new form"]


def test_a_file_that_is_being_made_or_says_no_capacity_has_no_records(tmp_path: Path) -> None:
    """An allocated file without a header is empty as yet, and a header with a capacity of 0 ends
    nothing.
    """
    path = tmp_path / "r"
    path.write_bytes(bytes(HEADER_BYTES + 100))
    follower = RingFollower(path)
    assert follower.records() == []
    ring = RingWriter(path, payload_bytes=4, capacity=8)
    ring.append(b"one ")
    assert len(follower.records()) == 1
    with path.open("r+b") as file:
        file.seek(16)
        file.write(bytes(4))
    assert follower.records() == []


def test_samples_and_marks_are_read_as_the_readers_do(tmp_path: Path) -> None:
    """Followed samples are those that `read_samples` returns, and marks carry what the black box
    was given.
    """
    ring = SampleRing(tmp_path / "samples")
    for step in range(1, 6):
        _append(ring, _sample(step, 1.0 / step))
    assert SampleFollower(tmp_path / "samples").new() == read_samples(tmp_path / "samples")
    box = BlackBox(tmp_path)
    box.step(StepMark.SKIPPED, 7, 4, math.inf, 2.0, 0.5)
    box.step(StepMark.BEGUN, 7, 4, None, None, 0.0)
    (made,) = SampleFollower(tmp_path / STEPS_FILE).new()
    assert (made.step, made.loss, made.grad_norm, made.seconds) == (7, math.inf, 2.0, 0.5)


def test_a_sample_is_held_back_until_its_loss_arrived(tmp_path: Path) -> None:
    """A loss that is amended later comes with its value.

    One that never comes is None after 16 steps.
    """
    ring, follower = SampleRing(tmp_path / "s"), SampleFollower(tmp_path / "s")
    _append(ring, _sample(1, 0.5))
    number = ring.write(2, 1, None, 0.5, 1e-3, 0.1, 0.0, 0, 0, 0, 0)
    _append(ring, _sample(3, 0.3))
    assert [sample.step for sample in follower.new()] == [1]
    ring.amend(number, loss=0.4)
    assert [(sample.step, sample.loss) for sample in follower.new()] == [(2, 0.4), (3, 0.3)]
    for step in range(4, 24):
        _append(ring, _sample(step, None))
    assert [sample.step for sample in follower.new()] == [4, 5, 6, 7]
    assert [sample.step for sample in follower.new(hold_back=False)] == list(range(8, 24))
    assert follower.lost == 0


def test_events_in_parts_arrive_when_their_last_part_is_written(tmp_path: Path) -> None:
    """Whatever the looks fall between, the events are those that the reader returns."""
    box, follower = BlackBox(tmp_path), EventFollower(tmp_path / EVENTS_FILE)
    found = []
    for number, size in enumerate((1, 3, 1, 9, 2)):
        box.event(
            Event(
                kind="k",
                global_step=number,
                unix_seconds=1.0,
                data={"text": "x" * (PART_BYTES * (size - 1))},
            )
        )
        found += follower.new()
    assert found == read_events(tmp_path)
    assert len(found) == 5
